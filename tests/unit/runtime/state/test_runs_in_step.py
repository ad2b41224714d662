"""The optimizer's kernels get few parameters at a time, with the numbers of one call for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from whale.runtime.state import joint
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.joint import ELEMENTWISE, JointOptimizer

BYTES = 24  # of a parameter


def made(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> EngineState:
    own = {name: nn.Parameter(torch.arange(6.0).reshape(2, 3) + ord(name)) for name in "abcde"}
    state = EngineState(dict(own), own, make(list(own.values())))
    state.forbid_outside_steps()
    return state


def train(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights after two steps, and how many gradients each call of an optimizer had."""
    counts = list[int]()
    with mock.patch.object(EngineState, "_check_from_inside", lambda state, *_: counts.append(len(state.gradients()))):
        state = made(make)
        for _ in range(2):
            given = {name: own.detach().sin() for name, own in state.kept.items() if name != "c"}
            state.give_gradients(given)
            state.advance(torch.zeros(()))
            assert all(state.kept[name].grad is each for name, each in given.items())
    return {name: own.detach() for name, own in state.kept.items()}, counts


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_the_numbers_are_those_of_one_call(kind: Any) -> None:
    def make(own: list[nn.Parameter]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = kind(
            [{"params": own[:2]}, {"params": own[2:], "weight_decay": 0.1} if with_decay else {"params": own[2:]}], **options
        )
        return found

    with_decay, options = kind is not torch.optim.Rprop, {"lr": 0.1, "foreach": True}
    expected, counts = train(make)
    assert counts == [4, 4]
    with mock.patch.object(joint, "RUN_BYTES", 3 * BYTES):
        found, counts = train(make)
    assert counts == [3, 1, 3, 1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def adam(own: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(own, lr=0.1, **options)


def several(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    return JointOptimizer({"a": adam(own[:1], foreach=True), "*": torch.optim.SGD(own[1:], lr=0.1)})


def hooked(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    found = adam(own, foreach=True)
    found.register_step_post_hook(lambda *_: None)
    return found


def wrapped(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    found = adam(own, foreach=True)
    step = found.step
    found.step = lambda: step()
    return found


def scheduled(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    found = adam(own, foreach=True)
    torch.optim.lr_scheduler.StepLR(found, 1)
    return found


def with_an_empty_group(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": own}, {"params": []}], lr=0.1)


CASES = {
    "many at once": (lambda own: adam(own, foreach=True), 4),
    "two optimizers": (several, 8),
    "with a scheduler": (scheduled, 4),
    "one by one": (adam, 1),
    "fused": (lambda own: adam(own, fused=True), 1),
    "not by element": (lambda own: torch.optim.Adafactor(own, foreach=True), 1),
    "an empty group": (with_an_empty_group, 1),
    "a hook": (hooked, 1),
    "another step": (wrapped, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_divided_only_where_that_changes_nothing(name: str) -> None:
    make, num_calls = CASES[name]
    with mock.patch.object(joint, "RUN_BYTES", BYTES):
        assert len(train(make)[1]) == 2 * num_calls


def test_hooks_of_all_optimizers_are_called_once_per_step() -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    with mock.patch.object(joint, "RUN_BYTES", BYTES):
        assert len(train(lambda own: adam(own, foreach=True))[1]) == 2
    handle.remove()
