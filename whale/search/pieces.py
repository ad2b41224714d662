"""What pieces of a model take on a kind of device, as running sums over the places to cut: a piece is the difference of two."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from whale.estimate import Line
from whale.estimate.costs.op_table import Floats
from whale.ir.cluster import Device
from whale.planning.pipeline.cut_points import CutPoints
from whale.search.columns import Columns

Sums = list[float]
"""Per place to cut, the sum of all that is before it."""

QUANTILE = 0.25
"""At the lightest so large a share of the places to cut there are enough for the stages."""


@dataclass(eq=False)
class Pieces:
    """The running sums of one model.

    Args:
        columns: prices its ops.
        points: where it can be cut.
    """

    columns: Columns
    points: CutPoints
    _timed: dict[tuple[Device, float, int, bool], tuple[Sums, Sums]] = field(default_factory=dict, init=False)
    _kept: dict[tuple[float, int], Sums] = field(default_factory=dict, init=False)

    @property
    def num_units(self) -> int:
        """The smallest pieces."""
        return self.points.num_units

    def seconds(self, kind: Device, rows: float, width: int, *, again: bool) -> tuple[Sums, Sums]:
        """Seconds of a micro-batch of so many rows, of a device of a split group and of the host that starts its kernels.

        Args:
            width: of the group, whose devices have equal parts of the work.
            again: whether everything is computed again in the backward pass.
        """
        key = kind, rows, width, again
        if key not in self._timed:
            found, times = self.columns.seconds(kind, rows), 1 + again
            own, started = found.forward * times + found.backward, found.started_forward * times + found.started_backward
            self._timed[key] = self._before((own / width)[self.columns.of]), self._before(started[self.columns.of])
        return self._timed[key]

    def held(self, rows: float, in_flight: int) -> Sums:
        """Bytes of parameters, with what training keeps beside them, and of activations of so many micro-batches."""
        key = rows, in_flight
        if key not in self._kept:
            kept = self.points.kept_fixed + self.points.kept_per_row * rows
            self._kept[key] = (self._parameters + in_flight * kept).tolist()
        return self._kept[key]

    @cached_property
    def trained(self) -> Sums:
        """Bytes of trainable parameters; each counts where it is read first."""
        return self._before(self.columns.first_trained)

    @cached_property
    def twice(self) -> float:
        """Bytes that count twice in `held`: of parameters that pieces far from one another read."""
        return float(self._parameters[-1] - self.points.parameters[0, -1])

    @cached_property
    def tied(self) -> float:
        """Of them, the bytes of the parameters alone."""
        return self.twice / max(1.0, float(self.points.parameters[0, -1])) * self.trained[-1]

    def kept(self, rows: float) -> float:
        """Bytes that all ops keep for the backward pass of a micro-batch of so many rows."""
        return float(self.points.kept_fixed[-1] + self.points.kept_per_row[-1] * rows)

    @cached_property
    def _parameters(self) -> Floats:
        """What several units read counts in each."""
        return np.concatenate(([0.0], np.cumsum(np.diagonal(self.points.parameters, 1))))

    @cached_property
    def crossing(self) -> Line:
        """Bytes that cross a cut, both ways, by rows: about the lightest places, of which there are enough."""
        inner = slice(1, -1) if self.num_units > 1 else slice(None)
        fixed, per_row = self.points.crossing_fixed[inner], self.points.crossing_per_row[inner]
        return Line(float(np.quantile(fixed, QUANTILE)), float(np.quantile(per_row, QUANTILE)))

    def _before(self, per_op: Floats) -> Sums:
        """The running sums over the ops that are bound to their place."""
        sums = np.concatenate(([0.0], np.cumsum(per_op * self._is_bound)))
        result: Sums = sums[self.points.bounds].tolist()
        return result

    @cached_property
    def _is_bound(self) -> Floats:
        return np.array([name not in self.points.floating for name in self.points.spine], dtype=np.float64)
