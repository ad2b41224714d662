"""Run by test_launch.py: a 2-stage pipeline, in whose second step rank 1 gets a signal (KILL, TERM, STOP) or fails by a warning (WARN)."""

import os
import signal
import sys
import warnings
from collections.abc import Iterable

import torch

import whale

RANK = int(os.environ["RANK"])
HOW = sys.argv[1]
if RANK == 1 and HOW == "WARN":
    warnings.simplefilter("error")  # as -W error does


class Fatal(torch.optim.SGD):
    """Plain SGD whose second step is the end of rank 1."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self) -> None:
        super().step()
        self.steps += 1
        if RANK == 1 and self.steps == 2:
            warnings.warn("the end", stacklevel=1) if HOW == "WARN" else os.kill(os.getpid(), signal.Signals[f"SIG{HOW}"])


def part(name: str) -> torch.nn.Module:
    with whale.replicate(device_count=1, name=name):
        return torch.nn.Linear(4, 4)


torch.manual_seed(0)
model = torch.nn.Sequential(part("front"), part("back"))
batch = (torch.randn(8, 4),)
engine = whale.parallelize(
    model, loss=lambda output, batch: output.square().mean(), optimizer=Fatal, batch=batch, config={"pipeline.num_micro_batch": 2}
)
for _ in range(10):
    engine.step(batch)
