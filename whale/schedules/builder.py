"""What a builder of schedules is: the order of one rank's computations as a pure function of a few numbers, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from whale.errors import ConfigError
from whale.ir.schedule import Action, Kind


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """The numbers that a schedule is built from.

    Attributes:
        num_ranks: pipeline ranks (virtual devices), p.
        num_micro_batch: micro-batches of a step, m.
        num_chunks: stages per rank, v.
        group_size: micro-batches that pass one chunk before the next chunk has its turn, g.
    """

    num_ranks: int
    num_micro_batch: int
    num_chunks: int = 1
    group_size: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


def round_robin(shape: ScheduleShape) -> tuple[int, ...]:
    """Stage k on rank k mod p: chunk c of rank r is stage c p + r."""
    return tuple(stage % shape.num_ranks for stage in range(shape.num_stages))


_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Builder:
    """One kind of schedule.

    Attributes:
        name: the word that a recipe picks it by.
        order: the computations (F, B or I and W, R) of one rank, in order. Where R runs before the
            gradient is awaited, a RECV_B between R and B says so.
        peak: the most chunk activations that a rank holds at once, from F to the last of B or W; never exceeded.
        waiting: the most micro-batches of one of its stages whose weight gradients wait for their W at once; never exceeded, and 0
            where B computes them.
        placement: the rank of each stage.
        chunks: stages per rank; None where any number will do.
        takes_group: whether `ScheduleShape.group_size` means anything to it.
        check: conditions of its own.
    """

    name: str
    order: Callable[[ScheduleShape, int], Iterable[Action]]
    peak: Callable[[ScheduleShape, int], int]
    placement: Callable[[ScheduleShape], tuple[int, ...]] = round_robin
    chunks: int | None = 1
    takes_group: bool = False
    check: Callable[[ScheduleShape], list[ConfigError]] = lambda shape: []
    waiting: Callable[[ScheduleShape, int], int] = lambda shape, rank: 0


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
