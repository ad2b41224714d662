"""The cut of a pipeline whose slowest stage is fastest, by bisection: within a time every stage takes as much as it can, in order.

Sums only grow, so to take more is never worse: a time within which the model does not end is below the slowest stage of every cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from whale.search.pieces import Sums

NUM_HALVINGS = 7
"""Of the last interval in which the time is sought: to one part in a hundred."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What takes a piece.

    Attributes:
        seconds, started: running sums of a device, and of its host.
        held: running sums of bytes.
        room: bytes that the piece may hold.
    """

    seconds: Sums
    started: Sums
    held: Sums
    room: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut.

    Attributes:
        bounds: the place where each stage starts, and the end.
        seconds: of each stage.
        least: below the slowest stage of every cut.
    """

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    least: float


def cut(stages: Sequence[Stage], num_units: int) -> Cut | None:
    """The fastest cut in which what every stage holds fits; None where there is none. Stages may be empty."""
    totals = [max(stage.seconds[-1], stage.started[-1]) for stage in stages]
    most = max(totals)
    if _within(stages, num_units, most) is None:
        return None
    low, high = 0.0, most / 4096 if min(totals) == 0.0 else 1 / sum(1 / total for total in totals)
    while (found := _within(stages, num_units, high)) is None:
        low, high = high, min(1.5 * high, most)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        nearer = _within(stages, num_units, middle)
        if nearer is None:
            low = middle
        else:
            high, found = middle, nearer
    seconds = tuple(
        max(stage.seconds[stop] - stage.seconds[start], stage.started[stop] - stage.started[start])
        for stage, start, stop in zip(stages, found, found[1:], strict=False)
    )
    return Cut(tuple(found), seconds, low)


def _within(stages: Sequence[Stage], num_units: int, limit: float) -> list[int] | None:
    """The bounds of a cut with no stage above a time; None where there is none."""
    bounds, start = [0], 0
    for stage in stages:
        stop = bisect_right(stage.seconds, stage.seconds[start] + limit, start + 1) - 1
        stop = bisect_right(stage.started, stage.started[start] + limit, start + 1, stop + 1) - 1
        stop = bisect_right(stage.held, stage.held[start] + stage.room, start + 1, stop + 1) - 1
        bounds.append(stop)
        start = stop
    return bounds if start == num_units else None
