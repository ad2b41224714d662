"""What one device of a split stage holds of each op's results, and which ops are cut along which axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.axes.index_sets import Runs, count, extent, index_set, intervals
from whale.axes.values import Axes, Concatenation, Dimension, Role, axes_of
from whale.errors import PlanError
from whale.ir.graph import ModelGraph, Op
from whale.ir.layout import BATCH
from whale.ir.plan import Cut
from whale.runtime.cutting.pieces import axis_sizes


@dataclass(frozen=True)
class Held:
    """The part of one tensor dimension that a device holds.

    Attributes:
        units: size of the dimension, the rows of the batch left out.
        parts: per device of the split group, its positions among the units.
        position: of this device.
        rows_outside: where the dimension also holds the batch, whether that is the outer factor.
        has_rows: whether it holds the batch.
    """

    units: int
    parts: tuple[Runs, ...]
    position: int
    rows_outside: bool
    has_rows: bool

    @property
    def runs(self) -> Runs:
        """This device's positions."""
        return self.parts[self.position]

    @property
    def count(self) -> int:
        """How many units this device holds."""
        return count(self.runs)


@dataclass(frozen=True)
class CutLayout:
    """The cuts of a stage as one device sees them.

    Attributes:
        model: the captured model.
        axes: its axes.
        cuts: of the stage.
        position: of this device in its split group.
    """

    model: ModelGraph
    axes: Axes
    cuts: tuple[Cut, ...]
    position: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of all axes."""
        return axis_sizes(self.axes)

    @cached_property
    def cut_axes(self) -> frozenset[str]:
        """The axes that are cut."""
        return frozenset(cut.axis for cut in self.cuts)

    @cached_property
    def _intervals(self) -> tuple[dict[str, tuple[int, int]], ...]:
        return tuple(intervals(self.cuts, position) for position in range(len(self.cuts[0].sizes) if self.cuts else 1))

    def is_cut(self, dimension: Dimension) -> bool:
        """Whether a device holds only a part of a dimension."""
        return any(axis in self.cut_axes for axis in axes_of(dimension))

    def dimensions(self, op: str, result: int = 0) -> tuple[Dimension, ...]:
        """The dimensions of one result of an op."""
        return self.axes.ops[op].outputs[result]

    def holds(self, op: str) -> bool:
        """Whether some result of an op is cut."""
        known = self.axes.ops.get(op)
        return known is not None and any(self.is_cut(dimension) for dimensions in known.outputs for dimension in dimensions)

    def axis(self, op: str) -> str | None:
        """The axis along which an op is cut, if it is; `faults` sees to it that there are not two."""
        roles = self.axes.ops[op].roles if op in self.axes.ops else {}
        return next((axis for axis in roles if axis in self.cut_axes), None)

    def role(self, op: str, axis: str) -> Role:
        """What an op does with an axis."""
        return self.axes.ops[op].roles[axis]

    def held(self, dimension: Dimension) -> Held:
        """What this device holds of a dimension that is cut."""
        rest, rows_outside = dimension, True
        if BATCH in dimension:
            at = dimension.index(BATCH)
            before, after = dimension[:at], dimension[at + 1 :]
            rows_outside = not self.is_cut(before)
            rest = after if rows_outside else before
        parts = tuple(index_set(rest, self.sizes, held) for held in self._intervals)
        return Held(extent(rest, self.sizes), parts, self.position, rows_outside, BATCH in dimension)

    def faults(self, ops: Sequence[str]) -> list[PlanError]:
        """Why these ops cannot be cut so, as errors at the user's lines."""
        found = [fault for cut in self.cuts if (fault := self._cut_fault(cut)) is not None]
        for name in ops:
            if name in self.axes.ops and (fault := self._op_fault(self.model.by_name[name])) is not None:
                found.append(fault)
        return found

    def _cut_fault(self, cut: Cut) -> PlanError | None:
        known = self.axes.by_name.get(cut.axis)
        if known is None:
            return PlanError(f"a cut names an axis of the model ({cut.axis!r} is none)")
        if cut.axis == BATCH:
            return PlanError("a split cuts an axis other than the batch (batch: replicate cuts that)")
        if sum(cut.sizes) != known.size:
            return PlanError(f"the sizes of a cut sum to its axis ({cut}: {sum(cut.sizes)}, {cut.axis}: {known.size})")
        if len(cut.sizes) != len(self.cuts[0].sizes):
            return PlanError(f"the cuts of a stage have equally many sizes ({cut} and {self.cuts[0]})")
        if min(cut.sizes) < 1:
            return PlanError(f"every device of a split group takes at least 1 of each axis ({cut})")
        return None

    def _axes_around(self, op: Op) -> set[str]:
        """The cut axes of an op's operands and results."""
        around = [op.name, *(name for name in op.inputs if name in self.axes.ops and len(self.axes.ops[name].outputs) == 1)]
        dimensions = (dimension for name in around for dims in self.axes.ops[name].outputs for dimension in dims)
        return {axis for dimension in dimensions for axis in axes_of(dimension)} & self.cut_axes

    def _op_fault(self, op: Op) -> PlanError | None:
        met = {axis: role for axis, role in self.axes.ops[op.name].roles.items() if axis in self.cut_axes}
        for axis, role in met.items():
            if role.kind == "whole":
                return PlanError(f"{op.target} (%{op.name}) needs {axis} whole, which is cut: it {role.reason}", where=op.where)
        unsaid = self._axes_around(op) - self.axes.ops[op.name].roles.keys()
        if unsaid:
            return PlanError(f"{op.target} (%{op.name}) does not say what it does with {min(unsaid)}, which is cut", where=op.where)
        if len(met) > 1:
            return PlanError(f"{op.target} (%{op.name}) meets two axes that are cut ({' and '.join(met)})", where=op.where)
        for dimensions in self.axes.ops[op.name].outputs:
            for dimension in dimensions:
                if self.is_cut(dimension) and any(_mixes_rows(factor) for factor in dimension):
                    return PlanError(f"{op.target} (%{op.name}) joins the batch and {next(iter(met))} in one dimension", where=op.where)
        return None


def _mixes_rows(factor: object) -> bool:
    return isinstance(factor, Concatenation) and any(BATCH in axes_of(piece) for piece in factor.pieces)
