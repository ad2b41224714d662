"""What a builder is: the order of one rank's computations as a pure function, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from whale.errors import ConfigError
from whale.ir.schedule import Action, Kind
from whale.schedules.orders.shape import Shape, round_robin

_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def nothing_else(shape: Shape) -> list[ConfigError]:
    """No condition on a shape beyond those that every builder has."""
    return []


def none_wait(shape: Shape, rank: int) -> int:
    """Weight gradients are computed with the others."""
    return 0


@dataclass(frozen=True)
class Builder:
    """One kind of schedule.

    Attributes:
        name: the word that a recipe picks it by.
        order: the computations (F, B or I and W, R) of one rank, in order. Where R runs before the
            gradient is awaited, a RECV_B between R and B says so.
        peak: the most chunk activations that a rank holds at once, from F to the last of B or W; never exceeded.
        waiting: the most micro-batches of one of its stages whose weight gradients wait for their W at once; never exceeded.
        placement: the rank of each stage.
        chunks: stages per rank; None where any number will do.
        takes_group: whether `Shape.group_size` means anything to it.
        check: conditions of its own.
    """

    name: str
    order: Callable[[Shape, int], Iterable[Action]]
    peak: Callable[[Shape, int], int]
    placement: Callable[[Shape], tuple[int, ...]] = round_robin
    chunks: int | None = 1
    takes_group: bool = False
    check: Callable[[Shape], list[ConfigError]] = nothing_else
    waiting: Callable[[Shape, int], int] = none_wait


def with_sync_and_step(order: Iterable[Action]) -> tuple[Action, ...]:
    """Adds each stage's SYNC right after its last backward, and the STEP at the end."""
    actions = list(order)
    stages = {action.stage for action in actions}
    finished: list[Action] = [Action(Kind.STEP)]
    while actions:
        action = actions.pop()
        if action.stage in stages and action.kind in _BACKWARD:
            stages.remove(action.stage)
            finished.append(Action(Kind.SYNC, action.stage))
        finished.append(action)
        if not stages:
            break
    return (*actions, *reversed(finished))
