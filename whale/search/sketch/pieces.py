"""What pieces of a model take on a kind of device, as running sums over the places to cut: a piece is the difference of two."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.estimate import Line
from whale.estimate.costs.op_table import Floats
from whale.planning.pipeline.cut_points import CutPoints
from whale.search.arrangement import Group
from whale.search.sketch.columns import Columns

Sums = list[float]
"""Per place to cut, the sum of all that is before it."""

HEAVY = 8.0
"""A model is not cut where so many times as much crosses as at a light place, as long as there are other places."""

QUANTILE = 0.25
"""At the lightest so large a share of the places to cut there are enough for the stages."""


@dataclass(eq=False)
class Pieces:
    """The running sums of one model.

    Args:
        columns: prices its ops.
        points: where it can be cut.
        places: those of them that are looked at, first and last among them.
    """

    columns: Columns
    points: CutPoints
    places: NDArray[np.int64]
    _timed: dict[tuple[Group, float, bool], tuple[Sums, Sums]] = field(default_factory=dict, init=False)
    _kept: dict[float, Sums] = field(default_factory=dict, init=False)

    @property
    def num_units(self) -> int:
        """The smallest pieces."""
        return len(self.places) - 1

    @cached_property
    def light(self) -> Pieces:
        """The pieces of the model without the places at which far more crosses than at others."""
        crossing = self.points.crossing_fixed + self.points.crossing_per_row
        few = crossing[self.places] <= HEAVY * np.quantile(crossing[self._inner], QUANTILE)
        few[[0, -1]] = True
        return Pieces(self.columns, self.points, self.places[few])

    def seconds(self, group: Group, rows: float, *, again: bool) -> tuple[Sums, Sums]:
        """Seconds of a micro-batch of so many rows, of a device of a split group and of the host that starts its kernels.

        Args:
            group: its devices have equal parts of the work.
            again: whether everything is computed again in the backward pass.
        """
        key = group, rows, again
        if key not in self._timed:
            found, times = self.columns.seconds(group.kind, rows), 1 + again
            own, started = found.forward * times + found.backward, found.started_forward * times + found.started_backward
            sums = self._before @ np.stack([own / group.width, started], axis=1)
            self._timed[key] = sums[:, 0].tolist(), sums[:, 1].tolist()
        return self._timed[key]

    def total(self, group: Group, rows: float) -> tuple[float, float]:
        """The last of both sums of `seconds`, if nothing is computed again."""
        found, counts = self.columns.seconds(group.kind, rows), self.columns.counts
        started = float((found.started_forward + found.started_backward) @ counts)
        return float((found.forward + found.backward) @ counts) / group.width, started

    @cached_property
    def parameters(self) -> Sums:
        """Bytes of parameters, with what training keeps beside them; what several units read counts in each."""
        result: Sums = np.concatenate(([0.0], np.cumsum(np.diagonal(self.points.parameters, 1))))[self.places].tolist()
        return result

    def kept(self, rows: float) -> Sums:
        """Bytes that are kept for the backward pass of a micro-batch of so many rows."""
        if rows not in self._kept:
            self._kept[rows] = (self.points.kept_fixed + self.points.kept_per_row * rows)[self.places].tolist()
        return self._kept[rows]

    @cached_property
    def trained(self) -> Sums:
        """Bytes of trainable parameters; each counts where it is read first."""
        bound = np.array([name not in self.points.floating for name in self.points.spine])
        result: Sums = np.concatenate(([0.0], np.cumsum(self.columns.first_trained * bound)))[self._bounds].tolist()
        return result

    @cached_property
    def twice(self) -> float:
        """Bytes that count twice in `parameters`: of those that pieces far from one another read."""
        return float(self.parameters[-1] - self.points.parameters[0, -1])

    @cached_property
    def tied(self) -> float:
        """Of them, the bytes of the parameters alone."""
        return self.twice / max(1.0, float(self.points.parameters[0, -1])) * self.trained[-1]

    @cached_property
    def crossing(self) -> Line:
        """Bytes that cross a cut, both ways, by rows: about the lightest places, of which there are enough."""
        fixed, per_row = self.points.crossing_fixed[self._inner], self.points.crossing_per_row[self._inner]
        return Line(float(np.quantile(fixed, QUANTILE)), float(np.quantile(per_row, QUANTILE)))

    @property
    def _inner(self) -> NDArray[np.int64]:
        """The places inside the model, where there are any."""
        return self.places[1:-1] if self.num_units > 1 else self.places

    @property
    def _bounds(self) -> NDArray[np.int64]:
        """Per place, the index into the spine."""
        return self.points.bounds[self.places]

    @cached_property
    def _before(self) -> Floats:
        """Per place, how many ops of each column are before it, of those that are bound to theirs: ``[places, columns]``."""
        points = self.points
        ops = np.zeros((len(points.spine) + 1, len(self.columns.counts)))
        bound = np.array([index for index, name in enumerate(points.spine) if name not in points.floating], dtype=np.int64)
        ops[bound + 1, self.columns.of[bound]] = 1.0
        result: Floats = np.cumsum(ops, axis=0)[self._bounds]
        return result


def pieces_of(columns: Columns, points: CutPoints) -> Pieces:
    """The pieces of a model between all the places where it can be cut."""
    return Pieces(columns, points, np.arange(len(points.bounds)))
