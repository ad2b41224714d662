"""The cut of a pipeline whose slowest stage is fastest, by bisection: within a time every stage takes as much as it can, in order.

Sums only grow, so to take more is never worse: a time within which the model does not end is below the slowest stage of every cut.
A stage that is left without anything takes the last piece of the one before it; where that is too much for it a longer time is tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from whale.search.sketch.pieces import Sums

NEAR = 0.01
"""The time is sought until it is known to this share of it."""

MOST_HALVINGS = 16
"""Of the last interval in which it is sought, where hardly any time may do."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What takes a piece.

    Attributes:
        seconds, started: running sums of a device, and of its host.
        parameters: running sums of bytes that are there once.
        kept: running sums of bytes that are there for each micro-batch in flight.
        in_flight: micro-batches.
        room: bytes that the piece may hold.
    """

    seconds: Sums
    started: Sums
    parameters: Sums
    kept: Sums
    in_flight: int
    room: float

    def held(self, start: int, stop: int) -> float:
        """Bytes that a piece holds."""
        return self.parameters[stop] - self.parameters[start] + self.in_flight * (self.kept[stop] - self.kept[start])

    def takes(self, start: int, stop: int, limit: float) -> bool:
        """Whether it can take a piece within a time."""
        if self.seconds[stop] > self.seconds[start] + limit or self.started[stop] > self.started[start] + limit:
            return False
        return self.held(start, stop) <= self.room

    def reach(self, start: int, limit: float) -> int:
        """The place up to which it can take what begins at one, within a time; its own where that is nothing."""
        stop = bisect_right(self.seconds, self.seconds[start] + limit, start + 1) - 1
        if self.started[stop] > self.started[start] + limit:
            stop = bisect_right(self.started, self.started[start] + limit, start + 1, stop + 1) - 1
        if self.held(start, stop) <= self.room:
            return stop
        return start + bisect_right(range(start + 1, stop), self.room, key=lambda place: self.held(start, place))


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut.

    Attributes:
        bounds: the place where each stage starts, and the end.
        seconds: of each stage.
    """

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]


def cut(stages: Sequence[Stage], num_units: int) -> Cut | None:
    """The fastest cut in which what every stage holds fits; None where there is none.

    Args:
        stages: in order; each has one at least of
        num_units: pieces that are not divided.
    """

    def within(limit: float) -> list[int] | None:
        found = _within(stages, num_units, limit)
        return None if found is None else _filled(stages, found, limit)

    totals = [max(stage.seconds[-1], stage.started[-1]) for stage in stages]
    most = max(totals)
    if within(most) is None:
        return None
    if len(stages) == 1:
        return Cut((0, num_units), (most,))
    low, high = 0.0, most / 4096 if min(totals) == 0.0 else 1 / sum(1 / total for total in totals)
    while (found := within(high)) is None:
        low, high = high, min(1.5 * high, most)
    for _ in range(MOST_HALVINGS):
        if high - low <= NEAR * high:
            break
        middle = (low + high) / 2
        nearer = within(middle)
        if nearer is None:
            low = middle
        else:
            high, found = middle, nearer
    seconds = tuple(
        max(stage.seconds[stop] - stage.seconds[start], stage.started[stop] - stage.started[start])
        for stage, start, stop in zip(stages, found, found[1:], strict=False)
    )
    return Cut(tuple(found), seconds)


def _within(stages: Sequence[Stage], num_units: int, limit: float) -> list[int] | None:
    """The bounds of a cut with no stage above a time; None where there is none. The first stages have most."""
    bounds = [0]
    for stage in stages:
        bounds.append(stage.reach(bounds[-1], limit))
    return bounds if bounds[-1] == num_units else None


def _filled(stages: Sequence[Stage], bounds: list[int], limit: float) -> list[int] | None:
    """The cut with a unit at least for every stage, from the last to the first; None where a stage cannot take its own."""
    for number in range(len(stages) - 1, -1, -1):
        if bounds[number + 1] <= number:
            return None  # too few for those before it
        bounds[number] = min(bounds[number], bounds[number + 1] - 1)
        if not stages[number].takes(bounds[number], bounds[number + 1], limit):
            return None
    return bounds
