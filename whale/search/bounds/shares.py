"""What a step takes at least where several teams divide its rows: the least time within which their replicas can take all of them.

Each replica takes as many rows as it may within a time. That is looked at for some numbers of rows: between two of them it may take all
that is below the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from whale.estimate.costs.op_table import Floats
from whale.search.arrangement import Order, Team
from whale.search.bounds.replicas import Asked, Replicas
from whale.search.bounds.summing import Summing, Sums
from whale.search.bounds.waiting import NO_ORDER

GRID = 64
"""Rows of a replica are looked at in about so many steps."""

FAR = 2.0
"""Of line-ups that take more than so many times what they might at least a lower bound is enough."""

AT_ONCE = 2048
"""So many line-ups are worked out together, where there are more."""

COARSE = 4
"""The first step that is looked at is one of every so many: so line-ups share what is worked out."""


@dataclass(frozen=True, slots=True)
class Divided:
    """Line-ups of equally many teams.

    Attributes:
        curves: seconds for numbers of rows of a replica, not falling, infinite at the end: ``[line-ups, teams, numbers]``.
        rows: what it has at most within less than each of these times: with less than the last of them too: ``[..., numbers + 1]``.
        counts: of replicas: ``[line-ups, teams]``.
    """

    curves: Floats
    rows: Floats
    counts: Floats

    def within(self, times: Floats) -> Floats:
        """Rows that a replica of each team computes at most within a time: ``[line-ups, teams]``."""
        index = np.count_nonzero(self.curves <= (times * (1 + 1e-12))[:, None, None], axis=2)
        found: Floats = np.take_along_axis(self.rows, index[:, :, None], axis=2)[:, :, 0]
        return found

    def seconds(self, num_rows: int) -> Floats:
        """The least of the times within which all rows may be taken, each replica having those that it must, by bisection."""
        times = np.sort(self.curves.reshape(len(self.curves), -1), axis=1)
        low, high = np.full(len(times), -1), np.count_nonzero(np.isfinite(times), axis=1) - 1
        line = np.arange(len(times))
        while (high - low > 1).any():
            middle = (low + high) // 2
            is_enough = (self.counts * self.within(times[line, middle])).sum(axis=1) >= num_rows
            low, high = np.where(is_enough | (middle < 0), low, middle), np.where(is_enough & (middle >= 0), middle, high)
        found: Floats = np.maximum(times[line, high], self.curves[:, :, 0].max(axis=1))
        return found


@dataclass(eq=False)
class Shares:
    """Bounds of line-ups of several teams.

    Args:
        replicas: what these take at least.
        sums: of their gradients.
        num_rows: of the global batch.
    """

    replicas: Replicas
    sums: Sums
    num_rows: int
    _curves: dict[Asked, Floats] = field(default_factory=dict, init=False)
    _first: dict[tuple[Team, ...], tuple[int, ...]] = field(default_factory=dict, init=False)
    _any: dict[tuple[Team, ...], float] = field(default_factory=dict, init=False)
    _rows: dict[tuple[int, int, int], tuple[float, ...]] = field(default_factory=dict, init=False)

    def seconds(self, wanted: Sequence[tuple[tuple[Team, ...], Order, int]]) -> list[float]:
        """The bound for each of these teams in an order with a number of micro-batches."""
        self._narrow([teams for teams in dict.fromkeys(teams for teams, _, _ in wanted) if teams not in self._first])
        found = [self._any[teams] if (order, m) == (NO_ORDER, 1) else math.nan for teams, order, m in wanted]
        new = [number for number, seconds in enumerate(found) if math.isnan(seconds)]
        looks = [self._looks(*wanted[number]) for number in new]
        self._work_out(each for own in looks for each in own)
        for places, divided in self._divided([wanted[number][0] for number in new], looks):
            for place, seconds in zip(places, divided.seconds(self.num_rows).tolist(), strict=True):
                found[new[place]] = seconds
        return found

    def _narrow(self, lineups: Sequence[tuple[Team, ...]]) -> None:
        """Finds from which step on rows are to be looked at: with fewer the others would take too long for the rest."""
        looks = [[self._asked(team, NO_ORDER, 1, 0, self.sums.of(teams)) for team in teams] for teams in lineups]
        self._work_out(each for own in looks for each in own)
        for places, divided in self._divided(lineups, looks):
            seconds = divided.seconds(self.num_rows)
            most = divided.counts * divided.within(FAR * seconds)
            fewest = (self.num_rows - most.sum(axis=1, keepdims=True) + most) / divided.counts
            steps = np.maximum(np.searchsorted(self._grid, fewest) - 1, 0) // COARSE * COARSE
            self._first.update((lineups[place], tuple(own)) for place, own in zip(places, steps.tolist(), strict=True))
            self._any.update((lineups[place], own) for place, own in zip(places, seconds.tolist(), strict=True))

    def _looks(self, teams: tuple[Team, ...], order: Order, m: int) -> list[Asked]:
        """What is to be known of each team: what was already found for all rows, or else of those that it may have."""
        found, summing = list[Asked](), self.sums.of(teams)
        for team, first in zip(teams, self._first[teams], strict=True):
            all_rows = self._asked(team, order, m, 0, summing)
            found.append(all_rows if all_rows in self._curves else self._asked(team, order, m, first, summing))
        return found

    def _asked(self, team: Team, order: Order, m: int, first: int, summing: Summing) -> Asked:
        """A row of each micro-batch at least, and not more rows than there are."""
        key = m, first, team.count
        if key not in self._rows:
            least, stop = bisect_right(self._steps, m) - 1, bisect_left(self._steps, self.num_rows / team.count) + 2
            self._rows[key] = (self._steps[least], *self._steps[max(first, least + 1) : stop])
        return Asked.of(team, order, m, self._rows[key], summing)

    def _work_out(self, looks: Iterable[Asked]) -> None:
        """Finds what is not known yet, made to not fall with the rows."""
        new = [each for each in dict.fromkeys(looks) if each not in self._curves]
        self._curves.update(zip(new, map(np.maximum.accumulate, self.replicas.seconds(new)), strict=True))

    def _divided(self, lineups: Sequence[tuple[Team, ...]], looks: Sequence[Sequence[Asked]]) -> Iterator[tuple[list[int], Divided]]:
        """Those that have equally many teams together, with their places."""
        alike: dict[int, list[int]] = {}
        for place, own in enumerate(looks):
            alike.setdefault(len(own), []).append(place)
        for places in (each[start : start + AT_ONCE] for each in alike.values() for start in range(0, len(each), AT_ONCE)):
            unlike = {look: number for number, look in enumerate(dict.fromkeys(look for place in places for look in looks[place]))}
            most = max(len(look.rows) for look in unlike)
            curves, rows = np.full((len(unlike), most), np.inf), np.zeros((len(unlike), most + 1))
            for look, number in unlike.items():
                stop = len(look.rows)
                curves[number, :stop], rows[number, :stop], rows[number, stop:] = self._curves[look], look.rows, look.rows[-1]
                rows[number, :stop] -= self._is_whole
            index = np.array([[unlike[look] for look in looks[place]] for place in places])
            counts = np.array([[float(team.count) for team in lineups[place]] for place in places])
            yield places, Divided(curves[index], rows[index], counts)

    @property
    def _is_whole(self) -> bool:
        """Whether the steps are all numbers of rows."""
        return self.num_rows <= GRID

    @cached_property
    def _grid(self) -> Floats:
        """Numbers of rows of a replica: all, where they are few."""
        few = np.arange(1, min(self.num_rows, GRID) + 1, dtype=np.float64)
        steps = 2.0 ** (np.arange(0, 8 * self.num_rows.bit_length()) / 8)  # the same for any power of two of micro-batches
        result: Floats = few if self._is_whole else steps[steps < 2 * self.num_rows]
        return result

    @cached_property
    def _steps(self) -> tuple[float, ...]:
        return tuple(self._grid.tolist())
