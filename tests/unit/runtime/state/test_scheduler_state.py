"""A scheduler's state by parameter: what schedulers over some groups kept, others over other groups go on with."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as of

from whale.runtime.state.optimizer_state import fitted_state, group_members, read_optimizer, read_scheduler, write_optimizer

torch.set_num_threads(1)
NAMES = "abcd"
DONE, MORE = 3, 5


class Faded:
    """A factor that is an object: its attributes are in the scheduler's state."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda own: of.StepLR(own, 2, 0.3),
    "lambda": lambda own: of.LambdaLR(own, lambda epoch: 1 / (1 + epoch)),
    "lambda of objects": lambda own: of.LambdaLR(own, [Faded(rate) for rate in rates(own)]),
    "one cycle": lambda own: of.OneCycleLR(own, max_lr=[10 * rate for rate in rates(own)], total_steps=20, cycle_momentum=False),
    "cyclic": lambda own: of.CyclicLR(own, rates(own), [9 * rate for rate in rates(own)], step_size_up=3, cycle_momentum=False),
    "restarts": lambda own: of.CosineAnnealingWarmRestarts(own, 3),
    "plateau": lambda own: of.ReduceLROnPlateau(own, patience=0, min_lr=[rate / 3 for rate in rates(own)]),
    "in turn": lambda own: of.SequentialLR(own, [of.LinearLR(own, 0.1, total_iters=2), of.LambdaLR(own, lambda e: 0.9**e)], [2]),
    "at once": lambda own: of.ChainedScheduler([of.ConstantLR(own, 0.5, 3), of.LambdaLR(own, lambda e: 0.9**e)]),
    "in turn, thrice": lambda own: of.SequentialLR(own, [of.LambdaLR(own, lambda e: 0.9**e) for _ in "abc"], [2, 4]),
    "as often as there are groups": lambda own: of.SequentialLR(own, [of.LambdaLR(own, lambda e: 0.9**e) for _ in NAMES], [4, 5, 7]),
}


def made(names: str, scheduler: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer, Any]:
    """A group for each parameter, of a rate that goes by its name; and one without parameters."""
    own = {name: nn.Parameter(torch.ones(2)) for name in names}
    groups: list[dict[str, Any]] = [{"params": [own[name]], "lr": 0.1 * (1 + NAMES.index(name))} for name in names]
    optimizer = torch.optim.SGD([*groups, {"params": [], "lr": 0.5}], momentum=0.9)
    return own, optimizer, SCHEDULERS[scheduler](optimizer)


def go_on(own: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, scheduler: Any, times: int) -> dict[str, list[float]]:
    """The rate of each parameter's group after each of some steps."""
    found: dict[str, list[float]] = {name: [] for name in own}
    for _ in range(times):
        for parameter in own.values():
            parameter.grad = torch.ones(2)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, of.ReduceLROnPlateau) else []))
        for names, rate in zip(group_members(optimizer, own), rates(optimizer), strict=True):
            for name in names:
                found[name].append(float(rate))
    return found


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("saving", "loading"), [("abcd", "ba"), ("abcd", "cbd"), ("ab cd", "abcd"), ("a bcd", "cd"), ("ab cd", "bd")])
def test_other_groups_go_on(scheduler: str, saving: str, loading: str) -> None:
    whole = made(NAMES, scheduler)
    go_on(*whole, DONE)
    saved = []
    for names in saving.split():
        own, optimizer, schedule = made(names, scheduler)
        go_on(own, optimizer, schedule, DONE)
        saved.append(pickle.loads(pickle.dumps(read_scheduler(schedule, optimizer, own))))
    own, optimizer, schedule = made(loading, scheduler)
    write_optimizer(optimizer, own, read_optimizer(whole[1], whole[0]))
    schedule.load_state_dict(fitted_state(schedule, optimizer, own, saved))
    expected = go_on(*whole, MORE)
    assert go_on(own, optimizer, schedule, MORE) == {name: expected[name] for name in loading}
