"""What a step would roughly take if the model could be cut anywhere, for all numbers of micro-batches at once: it says what is sketched.

t = 1 / (n_1 / T_1 + n_2 / T_2 + ...)      of a rank, where n_k ranks are of a kind that takes T_k for the whole model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from whale.estimate import bubble_share, optimizer_seconds
from whale.estimate.costs.op_table import Floats
from whale.search.arrangement import Group, Order, Team, sums_in_backward
from whale.search.sketch.sketch import BACKWARD, Sketches

STEPS = 2
"""So many numbers of rows are priced between one and its double; between them times are lines."""

AGAIN = 1 + (1 - BACKWARD)
"""So many times as long takes what is computed again in the backward pass."""

RULES = (True, False)
"""Whether replicas fill hosts; else those who hold the same stage are neighbours."""


AT_ONCE = 1 << 9
"""So many teams of line-ups are worked out together: what that takes stays in a cache."""


@dataclass(frozen=True)
class _Asked:
    """Teams of line-ups, of each line-up one; per team of theirs, those that are unlike.

    Attributes:
        places: line-ups, by number.
        shares: rows of a replica of the team there.
        teams: that are unlike.
        of: per line-up its team, by number among these.
    """

    places: NDArray[np.int64]
    shares: Floats
    teams: tuple[Team, ...]
    of: NDArray[np.int64]

    def column(self, figure: Callable[[Team], float]) -> Floats:
        """A figure of each team, found once for alike ones: ``[line-ups, 1]``."""
        return self.table(lambda team: (figure(team),))

    def table(self, figures: Callable[[Team], Sequence[float]]) -> Floats:
        """Figures likewise: ``[line-ups, figures]``."""
        result: Floats = np.array([figures(team) for team in self.teams], dtype=np.float64)[self.of]
        return result


@dataclass(eq=False)
class Rough:
    """Rough times of all arrangements of line-ups.

    Args:
        sketches: of them, which know what all is about.
        lineups: the replicas.
        orders: of their stages.
        micro_batches: numbers of them.
    """

    sketches: Sketches
    lineups: Sequence[Sequence[Team]]
    orders: Sequence[Order]
    micro_batches: Sequence[int]
    _ranks: list[list[tuple[Team, Floats]]] = field(default_factory=list, init=False)
    _ends: dict[tuple[int, bool], Floats] = field(default_factory=dict, init=False)
    _totals: dict[Group, tuple[Floats, Floats]] = field(default_factory=dict, init=False)

    @cached_property
    def passes(self) -> Floats:
        """Seconds of a step but for its end, ``[line-ups, orders, RULES, numbers of micro-batches]``; infinite where it seems not to fit.

        What is in no arrangement has some number.
        """
        m = np.array(self.micro_batches, dtype=np.float64)
        for near in RULES:
            deep = dict.fromkeys(team for lineup in self.lineups for team in lineup if team.num_ranks > 1)
            self.sketches.ties.find_borders(deep, near=near)
        speeds = np.zeros((len(self.lineups), len(self.orders), len(RULES), len(m)))
        self._ranks[:] = [[] for _ in self.lineups]
        for asked in self._asked():
            share = np.maximum(m, asked.shares[:, None])
            rank = self._rank(asked, share / m)
            weights = (asked.column(lambda team: team.count) * share)[:, None, None]
            speeds[asked.places] += weights / self._pipeline(asked, m, share / m, rank)
            for place, team, own in zip(asked.places.tolist(), asked.of.tolist(), rank, strict=True):
                self._ranks[place].append((asked.teams[team], own))
        found = np.full_like(speeds, np.inf)  # no speed at all where nothing fits
        np.divide(self.sketches.num_rows, speeds, out=found, where=speeds > 0)
        return found

    def end(self, place: int, *, near: bool) -> Floats:
        """Seconds of the end of a step of a line-up by its number, per number of micro-batches: what the last backward passes do not hide
        of the sums of gradients, and the optimizer.

        Args:
            near: whether replicas fill hosts.
        """
        assert self._ranks, "passes come first"
        if (place, near) not in self._ends:
            lineup, found = self.lineups[place], np.zeros(len(self.micro_batches))
            hides = BACKWARD if sums_in_backward(lineup) else 0.0
            for team, rank in self._ranks[place] if self.sketches.prices.training else ():
                hiding = hides * np.where(np.isfinite(rank), rank, 0.0)  # what does not fit hides nothing
                found = np.maximum(found, self._end(team, hiding, self.sketches.ties.sum_rates(lineup, team, near=near), near=near))
            self._ends[place, near] = found
        return self._ends[place, near]

    def _asked(self) -> Iterator[_Asked]:
        """All teams of all line-ups: first one of each, then another, in portions."""
        number = {team: place for place, team in enumerate(dict.fromkeys(team for lineup in self.lineups for team in lineup))}
        turns = list[list[tuple[int, float, Team]]]()
        for place, lineup in enumerate(self.lineups):
            shared = sorted(zip(lineup, self.sketches.shares(lineup), strict=True), key=lambda each: number[each[0]])
            turns += [[] for _ in range(len(shared) - len(turns))]
            for turn, (team, share) in zip(turns, shared, strict=False):
                turn.append((place, share, team))
        for turn in turns:
            for start in range(0, len(turn), AT_ONCE):
                places, shares, teams = zip(*turn[start : start + AT_ONCE], strict=True)
                unlike = {team: place for place, team in enumerate(dict.fromkeys(teams))}
                yield _Asked(np.array(places), np.array(shares), tuple(unlike), np.array([unlike[team] for team in teams]))

    def _rank(self, asked: _Asked, rows: Floats) -> Floats:
        """A rank for one micro-batch of so many rows each, with what its split groups exchange; infinite where there is no room."""
        again, fits = self.sketches.again, self._fits(asked, rows)
        speeds = np.zeros_like(rows)
        for each in zip_longest(*(team.numbers.items() for team in asked.teams)):  # a group of every team that has one left
            numbers = np.array([0 if own is None else own[1] for own in each])[asked.of]
            groups = [None if own is None else own[0] for own in each]
            for group in dict.fromkeys(group for group in groups if group is not None):
                own = np.flatnonzero(np.array([other == group for other in groups])[asked.of])
                speeds[own] += numbers[own, None] / self._total(group, rows[own])
        zero, one = asked.table(self._inside).T[:, :, None]
        seconds: Floats = 1 / speeds + zero + (one - zero) * rows
        with_again: Floats = seconds * AGAIN if True in again else np.full_like(seconds, np.inf)
        return np.where(fits, seconds, with_again) if False in again else with_again

    def _inside(self, team: Team) -> tuple[float, float]:
        """What the split groups of a team exchange on a rank for no row, and for one."""
        if not team.is_split:
            return 0.0, 0.0
        zero, one = (max(self.sketches.inside(rank, each) for rank in team.numbers) / team.num_ranks for each in (0.0, 1.0))
        return zero, one

    def _total(self, group: Group, rows: Floats) -> Floats:
        """Seconds of the whole model on a device of a split group."""
        if group not in self._totals:
            grid = 2.0 ** (np.arange(STEPS * self.sketches.num_rows.bit_length() + 1) / STEPS)
            pieces = self.sketches.pieces
            self._totals[group] = grid, np.array([max(pieces.total(group, float(own))) for own in grid])
        return np.interp(rows, *self._totals[group])

    def _fits(self, asked: _Asked, rows: Floats) -> Floats:
        """Whether what all ranks hold is less than all that they may."""
        pieces, capacity = self.sketches.pieces, self.sketches.prices.costs.capacity
        alive = np.minimum(asked.column(lambda team: (team.num_ranks + 1) / 2), self.sketches.num_rows / rows)
        kept = pieces.points.kept_fixed[-1] + pieces.points.kept_per_row[-1] * rows
        room = asked.column(lambda team: sum(capacity(kind) * number for kind, number in team.one.taken.items()))
        result: Floats = pieces.parameters[-1] + alive * kept <= room
        return result

    def _pipeline(self, asked: _Asked, m: Floats, rows: Floats, rank: Floats) -> Floats:
        """All micro-batches, with fill, drain and messages: ``[line-ups, orders, RULES, numbers of micro-batches]``."""
        sketches, rank = self.sketches, rank[:, None, None]
        p = asked.column(lambda team: team.num_ranks)
        v = np.array([order.num_chunks for order in self.orders])[:, None, None]
        borders = [asked.table(partial(self._border, near=near)) for near in RULES]
        latency, per_byte, narrowest = np.stack(borders, axis=1).transpose(2, 0, 1)[:, :, None, :, None]
        num_bytes = (sketches.pieces.crossing.fixed + sketches.pieces.crossing.per_row * rows) / asked.column(lambda team: team.narrowest)
        num_bytes = num_bytes[:, None, None]
        fills, most = asked.table(self._fills), asked.table(self._most)
        passes, waiting = (m + ((p - 1) * fills)[:, :, None, None]) * rank, 2 * latency + num_bytes * per_byte
        ahead = np.minimum(m, most[:, :, None, None] / v)
        back = m * (p[:, :, None, None] * rank + v * waiting) / ahead
        result: Floats = np.maximum(np.maximum(passes + waiting, back), m * v * num_bytes / 2 * narrowest)
        return result

    def _border(self, team: Team, *, near: bool) -> tuple[float, float, float]:
        """The way of a micro-batch along a pipeline, which one rank has not."""
        if team.num_ranks == 1:
            return 0.0, 0.0, 0.0
        way = self.sketches.ties.borders(team, near=near)
        return way.latency, way.per_byte, way.narrowest

    def _fills(self, team: Team) -> list[float]:
        """Per order, the share of a pass that fill and drain take for each rank but one."""
        kind = team.ranks[0].kind
        return [bubble_share(order.schedule, order.num_chunks) + self.sketches.unfilled(order, kind) for order in self.orders]

    def _most(self, team: Team) -> list[int]:
        """Per order, what may be in flight at most; of orders that are in no arrangement some number."""
        p, num_units = team.num_ranks, self.sketches.pieces.num_units
        return [self.sketches.in_flight(order, p, 2 * p)[0] if p * order.num_chunks <= num_units else p for order in self.orders]

    def _end(self, team: Team, hiding: Floats, rates: Sequence[float], *, near: bool) -> Floats:
        """The end of the replicas of a team.

        Args:
            hiding: seconds behind which sums hide, per number of micro-batches.
            rates: per rank, seconds per byte of the gradients that it sums.
        """
        sketches, p, first = self.sketches, team.one.num_devices, team.ranks[0]
        states = sketches.prices.costs.optimizer_states
        update = min(optimizer_seconds(kind, 1.0, 1.0, states) for kind in team.taken) * sketches.pieces.trained[-1] / p
        if team.num_ranks > 1:
            speed = sketches.speed(team.one)
            trained = {kind: sketches.speed(Team((Group(kind),), 1)) / speed * sketches.pieces.trained[-1] for kind in team.taken}
            exposed = max(trained[rank.kind] * rate for rank, rate in zip(team.ranks, rates, strict=True)) - hiding
            last: Floats = np.maximum(0.0, exposed) + update + sketches.pieces.tied * sketches.ties.ends_rate(team, near=near)
            return last
        num_bytes, left = sketches.pieces.columns.last_sums(first.kind, sketches.num_rows)
        late: Floats = np.max(rates[0] * num_bytes / p - hiding[:, None] * left, axis=1) + update
        return late
