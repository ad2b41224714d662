"""What a step would roughly take if the model could be cut anywhere, for all numbers of micro-batches at once: it says what is sketched.

t = 1 / (n_1 / T_1 + n_2 / T_2 + ...)      of a rank, where n_k ranks are of a kind that takes T_k for the whole model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

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


@dataclass(eq=False)
class Rough:
    """Rough times of all arrangements of line-ups.

    Args:
        sketches: of them, which know what all is about.
    """

    sketches: Sketches
    _totals: dict[Group, tuple[Floats, Floats]] = field(default_factory=dict, init=False)

    def seconds(
        self, lineups: Sequence[Sequence[Team]], orders: Sequence[Order], micro_batches: Sequence[int], rules: Sequence[Sequence[bool]]
    ) -> Floats:
        """Seconds of a step, ``[line-ups, orders, RULES, numbers of micro-batches]``; infinite where it seems not to fit.

        What is not asked for, or is in no arrangement, has some number.

        Args:
            rules: per line-up, those that are asked for.
        """
        m = np.array(micro_batches, dtype=np.float64)
        speeds = np.zeros((len(lineups), len(orders), len(RULES), len(m)))
        ends = np.zeros((len(lineups), len(RULES), len(m)))
        hides = np.array([[BACKWARD if sums_in_backward(lineup) else 0.0] for lineup in lineups])
        for team, (places, found) in self._shares(lineups).items():
            share = np.maximum(m, np.array(found)[:, None])
            rank = self._rank(team, share / m)
            speeds[places] += team.count * share[:, None, None] / self._pipeline(team, orders, m, share / m, rank)
            hiding = hides[places] * np.where(np.isfinite(rank), rank, 0.0)  # what does not fit hides nothing
            if self.sketches.prices.training:
                rates = self._rates(team, [(lineups[place], rules[place]) for place in places])
                ends[places] = np.maximum(ends[places], self._end(team, hiding[:, None], rates))
        passes = np.full_like(speeds, np.inf)  # no speed at all where nothing fits
        np.divide(self.sketches.num_rows, speeds, out=passes, where=speeds > 0)
        result: Floats = passes + ends[:, None]
        return result

    def _shares(self, lineups: Sequence[Sequence[Team]]) -> dict[Team, tuple[list[int], list[float]]]:
        """Per team the line-ups that have it, by number, and the rows of one of its replicas there."""
        found: dict[Team, tuple[list[int], list[float]]] = {}
        for number, lineup in enumerate(lineups):
            for team, share in zip(lineup, self.sketches.shares(lineup), strict=True):
                places, shares = found.setdefault(team, ([], []))
                places.append(number)
                shares.append(share)
        return found

    def _rank(self, team: Team, rows: Floats) -> Floats:
        """A rank for one micro-batch of so many rows each, with what its split groups exchange; infinite where there is no room."""
        allowed, fits = self.sketches.again, self._fits(team, rows)
        seconds: Floats = 1 / np.sum([number / self._total(rank, rows) for rank, number in team.numbers.items()], axis=0)
        if team.is_split:
            zero, one = (max(self.sketches.inside(rank, each) for rank in team.numbers) / team.num_ranks for each in (0.0, 1.0))
            seconds = seconds + zero + (one - zero) * rows
        with_again: Floats = seconds * AGAIN if True in allowed else np.full_like(seconds, np.inf)
        return np.where(fits, seconds, with_again) if False in allowed else with_again

    def _total(self, group: Group, rows: Floats) -> Floats:
        """Seconds of the whole model on a device of a split group."""
        if group not in self._totals:
            grid = 2.0 ** (np.arange(STEPS * self.sketches.num_rows.bit_length() + 1) / STEPS)
            pieces = self.sketches.pieces
            self._totals[group] = grid, np.array([max(pieces.total(group, float(own))) for own in grid])
        return np.interp(rows, *self._totals[group])

    def _fits(self, team: Team, rows: Floats) -> Floats:
        """Whether what all ranks hold is less than all that they may."""
        pieces, capacity = self.sketches.pieces, self.sketches.prices.costs.capacity
        alive = np.minimum((team.num_ranks + 1) / 2, self.sketches.num_rows / rows)
        kept = pieces.points.kept_fixed[-1] + pieces.points.kept_per_row[-1] * rows
        room = sum(capacity(kind) * number for kind, number in team.one.taken.items())
        result: Floats = pieces.parameters[-1] + alive * kept <= room
        return result

    def _pipeline(self, team: Team, orders: Sequence[Order], m: Floats, rows: Floats, rank: Floats) -> Floats:
        """All micro-batches, with fill, drain and messages: ``[line-ups, orders, RULES, numbers of micro-batches]``."""
        p, rank = team.num_ranks, rank[:, None, None]
        if p == 1:
            return np.broadcast_to(m * rank, (len(rows), len(orders), len(RULES), len(m)))
        sketches = self.sketches
        v = np.array([order.num_chunks for order in orders])[:, None, None]
        known = [p * order.num_chunks <= sketches.pieces.num_units for order in orders]  # others are in no arrangement
        most = [sketches.in_flight(order, p, 2 * p)[0] if is_known else p for order, is_known in zip(orders, known, strict=True)]
        borders = [sketches.ties.borders(team, near=near) for near in RULES]
        latency, per_byte, narrowest = np.array([(each.latency, each.per_byte, each.narrowest) for each in borders]).T[:, :, None]
        num_bytes = ((sketches.pieces.crossing.fixed + sketches.pieces.crossing.per_row * rows) / team.narrowest)[:, None, None]
        fills = [bubble_share(order.schedule, order.num_chunks) + sketches.unfilled(order, team.ranks[0].kind) for order in orders]
        passes, waiting = (m + (p - 1) * np.array(fills)[:, None, None]) * rank, 2 * latency + num_bytes * per_byte
        ahead = np.minimum(m, np.array(most)[:, None, None] / v)
        back = m * (p * rank + v * waiting) / ahead
        result: Floats = np.maximum(np.maximum(passes + waiting, back), m * v * num_bytes / 2 * narrowest)
        return result

    def _rates(self, team: Team, asked: Sequence[tuple[Sequence[Team], Sequence[bool]]]) -> Mapping[Group, Floats]:
        """Seconds per byte of a gradient that the replicas of line-ups add up, by who has it in a team: ``[line-ups, RULES, 1]``.

        Of the ranks of a kind those count that take longest.
        """
        found = {rank: np.zeros((len(asked), len(RULES), 1)) for rank in team.numbers}
        for number, (lineup, rules) in enumerate(asked):
            for near in rules:
                rates, place, start = self.sketches.ties.sum_rates(lineup, team, near=near), RULES.index(near), 0
                for rank, count in team.runs:
                    own, start = found[rank], start + count
                    own[number, place] = max(own[number, place, 0], *rates[start - count : start])
        return found

    def _end(self, team: Team, hiding: Floats, rates: Mapping[Group, Floats]) -> Floats:
        """What the last backward passes do not hide of the sums of gradients, and the optimizer: ``[line-ups, RULES, numbers]``."""
        sketches, p, first = self.sketches, team.one.num_devices, team.ranks[0]
        states = sketches.prices.costs.optimizer_states
        update = min(optimizer_seconds(kind, 1.0, 1.0, states) for kind in team.taken) * sketches.pieces.trained[-1] / p
        if team.num_ranks > 1:
            speed = sketches.speed(team.one)
            trained = {rank: sketches.speed(Team((Group(rank.kind),), 1)) / speed * sketches.pieces.trained[-1] for rank in team.numbers}
            exposed = np.max([own * rates[rank] for rank, own in trained.items()], axis=0) - hiding
            ends = np.array([[sketches.ties.ends_rate(team, near=near)] for near in RULES])
            last: Floats = np.maximum(0.0, exposed) + update + sketches.pieces.tied * ends
            return last
        num_bytes, left = sketches.pieces.columns.last_sums(first.kind, sketches.num_rows)
        late: Floats = np.max(rates[first][..., None] * num_bytes / p - hiding[..., None] * left, axis=-1) + update
        return late
