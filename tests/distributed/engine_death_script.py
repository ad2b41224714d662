"""Run by test_launch.py: a 2-stage pipeline in training, in whose second step rank 1 gets a signal (KILL, TERM, STOP)."""

import os
import signal
import sys
from collections.abc import Iterable

import torch

import whale

RANK = int(os.environ["RANK"])
SIGNAL = signal.Signals[f"SIG{sys.argv[1]}"]


class Fatal(torch.optim.SGD):
    """Plain SGD whose second step is the end of rank 1."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        if RANK == 1 and self.steps == 2:
            os.kill(os.getpid(), SIGNAL)


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
