"""What code does beside tensors while it is captured, and a plain step does each time, is told: draws beside torch's, and notes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whale.capture import capture

BATCH = torch.ones(4, 2)
Loss = Callable[[Tensor, Tensor], Tensor]

own = random.Random(0)
calls = 0


class Scaling(nn.Module):
    """Scales a layer by a number of Python's, or one that a function of NumPy's gives."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(2, 2), draw

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.draw()
        return found


class Seeded(nn.Module):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rng = nn.Linear(2, 2), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.rng.random()
        return found


def of_python() -> float:
    return random.random()


def of_numpy() -> float:
    return float(np.random.beta(1, 1))


def of_an_own_one() -> float:
    return own.random()


def unseen() -> float:
    return 1.0 if random.random() < 2 else 0.0


def of_torch() -> float:
    random.Random(1).random()  # made anew: the same in each step
    return 1.0


def mean(output: Tensor, batch: Tensor) -> Tensor:
    return output.mean()


def warnings_of(model: nn.Module, loss: Loss = mean) -> tuple[str, ...]:
    graph, program = capture(model, BATCH, loss)
    assert all(text in graph.warnings for text in program.warnings)
    return program.warnings


@pytest.mark.parametrize("draw", [of_python, of_numpy])
def test_draws_are_told_with_the_line_that_they_change(draw: Callable[[], float]) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()
    (said,) = warnings_of(Scaling(draw))
    line = f"{__file__.rpartition('/')[2]}:{Scaling.forward.__code__.co_firstlineno + 1}"
    assert said.startswith("random numbers of Python and NumPy are drawn only during capture (") and line in said
    assert states == (random.getstate(), np.random.get_state()[1].tolist()), "the script draws on as if nothing had been drawn"


@pytest.mark.parametrize(
    ("make", "generator"), [(Seeded, "Seeded.rng"), (lambda: Scaling(of_an_own_one), "own"), (lambda: Scaling(unseen), "random")]
)
def test_draws_of_any_generator_at_hand_are_told(make: Callable[[], nn.Module], generator: str) -> None:
    (said,) = warnings_of(make())
    assert f"only during capture ({generator}): each step uses the same numbers" in said


def test_nothing_is_said_where_nothing_is_drawn() -> None:
    assert warnings_of(Scaling(of_torch)) == ()
    assert warnings_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))) == ()


class Counting:
    """A loss that warms up by a counter of its own."""

    calls = 0

    def __call__(self, output: Tensor, batch: Tensor) -> Tensor:
        self.calls += 1
        return output.mean() * min(1.0, self.calls / 10)


class Centred(nn.Module):
    """A loss that is a module, with a running mean that it replaces."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, output: Tensor, batch: Tensor) -> Tensor:
        loss = (output - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return loss


def of_a_closure() -> tuple[Loss, Callable[[], object]]:
    number = 0

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return output.mean() * number

    return loss, lambda: number


def of_a_global() -> tuple[Loss, Callable[[], object]]:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        global calls
        calls += 1
        return output.mean() * calls

    return loss, lambda: calls


def of_an_object() -> tuple[Loss, Callable[[], object]]:
    loss = Counting()
    return loss, lambda: loss.calls


def of_a_buffer() -> tuple[Any, Callable[[], object]]:
    loss = Centred()
    return loss, lambda: loss.center


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (of_a_closure, "number: 0, now 1"),
        (of_a_global, "calls: 0, now 1"),
        (of_an_object, "Counting.calls: nothing, now 1"),
        (of_a_buffer, "Centred.center: a tensor, now a tensor"),
    ],
)
def test_notes_outside_the_model_are_told_and_put_back(make: Callable[[], tuple[Loss, Callable[[], object]]], told: str) -> None:
    loss, value = make()
    before = value()
    (said,) = warnings_of(nn.Linear(2, 2), loss)
    assert f"starts from the values at capture ({told})" in said
    assert value() is before
