"""What a step takes at least where several teams divide its rows: the least time within which their replicas can take all of them.

Each replica takes as many rows as it may within a time. That is looked at for some numbers of rows: between two of them it may take all
that is below the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from whale.estimate.costs.op_table import Floats
from whale.search.arrangement import Order, Team
from whale.search.bounds.replicas import Asked, Replicas, asked
from whale.search.bounds.summing import Sums
from whale.search.bounds.waiting import NO_ORDER

GRID = 64
"""Rows of a replica are looked at in about so many steps."""

FAR = 2.0
"""Of line-ups that take more than so many times what they might at least a lower bound is enough."""

COARSE = 4
"""The first step that is looked at is one of every so many: so line-ups share what is worked out."""


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

    def seconds(self, wanted: Sequence[tuple[tuple[Team, ...], Order, int]]) -> list[float]:
        """The bound for each of these teams in an order with a number of micro-batches."""
        self._narrow([teams for teams in dict.fromkeys(teams for teams, _, _ in wanted) if teams not in self._first])
        looks = [self._looks(*each) for each in wanted]
        self._work_out(each for own in looks for each in own)
        return [self._together(teams, own) for (teams, _, _), own in zip(wanted, looks, strict=True)]

    def _narrow(self, lineups: Sequence[tuple[Team, ...]]) -> None:
        """Finds from which step on rows are to be looked at: with fewer the others would take too long for the rest."""
        base = [[self._asked(teams, team, NO_ORDER, 1, 0) for team in teams] for teams in lineups]
        self._work_out(each for own in base for each in own)
        for teams, own in zip(lineups, base, strict=True):
            until = np.array([FAR * self._together(teams, own)])
            most = [team.count * float(self._within(each, until)[0]) for team, each in zip(teams, own, strict=True)]
            fewest = [(self.num_rows - sum(most) + mine) / team.count for team, mine in zip(teams, most, strict=True)]
            places = np.maximum(np.searchsorted(self._grid, fewest) - 1, 0) // COARSE * COARSE
            self._first[teams] = tuple(places.tolist())

    def _looks(self, teams: tuple[Team, ...], order: Order, m: int) -> list[Asked]:
        """What is to be known of each team: what was already found for all rows, or else of those that it may have."""
        found = list[Asked]()
        for team, first in zip(teams, self._first[teams], strict=True):
            all_rows = self._asked(teams, team, order, m, 0)
            found.append(all_rows if all_rows in self._curves else self._asked(teams, team, order, m, first))
        return found

    def _asked(self, teams: Sequence[Team], team: Team, order: Order, m: int, first: int) -> Asked:
        """A row of each micro-batch at least, and not more rows than there are."""
        least = int(np.searchsorted(self._grid, m, side="right")) - 1
        stop = int(np.searchsorted(self._grid, self.num_rows / team.count)) + 2
        rows = (self._steps[least], *self._steps[max(first, least + 1) : stop])
        return asked(team, order, m, rows, self.sums.of(teams))

    def _work_out(self, looks: Iterable[Asked]) -> None:
        """Finds what is not known yet, made to not fall with the rows."""
        new = [each for each in dict.fromkeys(looks) if each not in self._curves]
        self._curves.update(zip(new, map(np.maximum.accumulate, self.replicas.seconds(new)), strict=True))

    def _together(self, teams: Sequence[Team], looks: Sequence[Asked]) -> float:
        """Until replicas have taken all rows, each as many as it may, but those that it must."""
        curves = [self._curves[each] for each in looks]
        times = np.unique(np.concatenate(curves))
        taken = sum(team.count * self._within(each, times) for team, each in zip(teams, looks, strict=True))
        floor = max(float(curve[0]) for curve in curves)
        return max(floor, float(times[min(int(np.searchsorted(taken, self.num_rows)), len(times) - 1)]))

    def _within(self, look: Asked, times: Floats) -> Floats:
        """At most so many rows does a replica compute within each of these times: the next number that was looked at is too much."""
        index = np.searchsorted(self._curves[look], times * (1 + 1e-12), side="right")
        rows = np.array(look.rows)
        found: Floats = np.concatenate((rows - self._is_whole, rows[-1:]))[index]
        return found

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
