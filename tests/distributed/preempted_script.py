"""Run by test_launch.py: trains until it is stopped, twice; then goes on for some steps, and holds them to an undisturbed training."""

import os
import sys
from functools import partial
from pathlib import Path

import torch

import whale

FOLDER = Path(sys.argv[1])


def train(num_steps: int | None, saved: Path | None = None) -> list[torch.Tensor]:
    """The weights after so many steps, or never, from a checkpoint on."""
    torch.manual_seed(0)
    samples = list(torch.randn(32, 4))
    engine = whale.parallelize(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)),
        loss=lambda output, batch: (output - batch).square().mean(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        batch=torch.stack(samples[:8]),
        config={"runtime.save_on_sigterm": str(FOLDER)},
    )
    if saved is not None:
        assert engine.load(saved) is None
    say_at = engine.step_number + 3
    loader = engine.loader(samples, global_batch_size=8, shuffle=True, num_workers=1)  # a worker is no rank: it goes on
    while engine.step_number != num_steps:
        for batch in loader:
            engine.step(batch)
            if num_steps is None and engine.step_number == say_at:
                (FOLDER / f"{len(found)}_{engine.rank}.{os.getpid()}").touch()
            if engine.step_number == num_steps:
                break
    return list(engine.state_dict().values())


found = sorted(FOLDER.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
if len(found) < 2:
    train(None, *found)
last_step = int(found[-1].name.removeprefix("step_")) + 3
for resumed, undisturbed in zip(train(last_step, found[-1]), train(last_step), strict=True):
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)
