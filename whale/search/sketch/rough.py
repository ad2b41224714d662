"""What a step would roughly take if the model could be cut anywhere, for all numbers of micro-batches at once: it says what is sketched.

t = 1 / (n_1 / T_1 + n_2 / T_2 + ...)      of a rank, where n_k ranks are of a kind that takes T_k for the whole model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from whale.estimate import optimizer_seconds
from whale.estimate.costs.op_table import Floats
from whale.ir.cluster import Device
from whale.search.arrangement import Order, Team, sums_in_backward
from whale.search.sketch.sketch import BACKWARD, Sketches

STEPS = 2
"""So many numbers of rows are priced between one and its double; between them times are lines."""

AGAIN = 1 + (1 - BACKWARD)
"""So many times as long takes what is computed again in the backward pass."""


@dataclass(eq=False)
class Rough:
    """Rough times of all arrangements of a line-up.

    Args:
        sketches: of them, which know what all is about.
    """

    sketches: Sketches
    _totals: dict[tuple[Device, int], tuple[Floats, Floats]] = field(default_factory=dict, init=False)

    def seconds(self, teams: Sequence[Team], orders: Sequence[Order], micro_batches: Sequence[int], rules: Sequence[bool]) -> Floats:
        """Seconds of a step, ``[rules, orders, numbers of micro-batches]``; infinite where it seems not to fit.

        Args:
            rules: whether replicas fill hosts; else those who hold the same stage are neighbours.
        """
        m = np.array(micro_batches, dtype=np.float64)
        shares = [np.maximum(m, share) for share in self.sketches.shares(teams)]
        ranks = [self._rank(team, share / m) for team, share in zip(teams, shares, strict=True)]
        speeds = np.zeros((len(rules), len(orders), len(m)))
        for team, share, rank in zip(teams, shares, ranks, strict=True):
            speeds += team.count * share / self._pipeline(team, orders, m, share / m, rank, rules)
        passes = np.full_like(speeds, np.inf)  # no speed at all where nothing fits
        np.divide(self.sketches.num_rows, speeds, out=passes, where=speeds > 0)
        if not self.sketches.prices.training:
            return passes
        rates = np.array([self.sketches.ties.sum_rate(teams, near=near) for near in rules])
        hides = BACKWARD if sums_in_backward(teams) else 0.0
        hiding = [hides * np.where(np.isfinite(rank), rank, 0.0) for rank in ranks]  # what does not fit hides nothing
        ends = [self._end(team, own, rates[:, None]) for team, own in zip(teams, hiding, strict=True)]
        result: Floats = passes + np.max(ends, axis=0)[:, None, :]
        return result

    def _rank(self, team: Team, rows: Floats) -> Floats:
        """A rank for one micro-batch of so many rows each, with what its split groups exchange; infinite where there is no room."""
        allowed, fits = self.sketches.again, self._fits(team, rows)
        seconds: Floats = 1 / np.sum([number / self._total(kind, team.width, rows) for kind, number in team.numbers.items()], axis=0)
        if team.width > 1:
            zero, one = (self.sketches.inside(team, each) for each in (0.0, 1.0))
            seconds = seconds + zero + (one - zero) * rows
        with_again: Floats = seconds * AGAIN if True in allowed else np.full_like(seconds, np.inf)
        return np.where(fits, seconds, with_again) if False in allowed else with_again

    def _total(self, kind: Device, width: int, rows: Floats) -> Floats:
        """Seconds of the whole model on a device of a split group."""
        key = kind, width
        if key not in self._totals:
            grid = 2.0 ** (np.arange(STEPS * self.sketches.num_rows.bit_length() + 1) / STEPS)
            pieces = self.sketches.pieces
            self._totals[key] = grid, np.array([max(pieces.total(kind, float(own), width)) for own in grid])
        return np.interp(rows, *self._totals[key])

    def _fits(self, team: Team, rows: Floats) -> Floats:
        """Whether what all ranks hold is less than all that they may."""
        pieces, capacity = self.sketches.pieces, self.sketches.prices.costs.capacity
        alive = np.minimum((team.num_ranks + 1) / 2, self.sketches.num_rows / rows)
        kept = pieces.points.kept_fixed[-1] + pieces.points.kept_per_row[-1] * rows
        room = sum(capacity(kind) * number for kind, number in team.numbers.items()) * team.width
        result: Floats = pieces.parameters[-1] + alive * kept <= room
        return result

    def _pipeline(self, team: Team, orders: Sequence[Order], m: Floats, rows: Floats, rank: Floats, rules: Sequence[bool]) -> Floats:
        """All micro-batches, with fill, drain and messages: ``[rules, orders, numbers of micro-batches]``, or what stands for that."""
        p = team.num_ranks
        if p == 1:
            return m * rank
        sketches = self.sketches
        v = np.array([[order.num_chunks] for order in orders])
        most = np.array([[sketches.in_flight(order, p, 2 * p)[0]] for order in orders])
        passes = (m + (p - 1) / v) * rank
        borders = [sketches.ties.borders(team, near=near) for near in rules]
        latency, per_byte, narrowest = np.array([(each.latency, each.per_byte, each.narrowest) for each in borders]).T[:, :, None, None]
        num_bytes = (sketches.pieces.crossing.fixed + sketches.pieces.crossing.per_row * rows) / team.width
        waiting = 2 * latency + num_bytes * per_byte
        ahead = np.minimum(m, most / v)
        result: Floats = np.maximum(np.maximum(passes + waiting, m * (p * rank + v * waiting) / ahead), m * v * num_bytes / 2 * narrowest)
        return result

    def _end(self, team: Team, hiding: Floats, rates: Floats) -> Floats:
        """What the last backward passes do not hide of the sums of gradients, and the optimizer: ``[rules, numbers of micro-batches]``."""
        sketches, p = self.sketches, team.num_ranks * team.width
        states = sketches.prices.costs.optimizer_states
        update = min(optimizer_seconds(kind, 1.0, 1.0, states) for kind in team.numbers) * sketches.pieces.trained[-1] / p
        if team.num_ranks > 1:
            return np.maximum(0.0, sketches.pieces.trained[-1] / p * rates - hiding) + update + sketches.pieces.tied * rates
        num_bytes, left = sketches.pieces.columns.last_sums(team.kinds[0], sketches.num_rows)
        exposed: Floats = np.max(rates[:, :, None] * num_bytes / p - hiding[:, None] * left, axis=2)
        return exposed + update
