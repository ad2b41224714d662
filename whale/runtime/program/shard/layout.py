"""What one device of a split stage holds of each op's results, and which parts the other devices hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.axes.labels import Labels
from whale.axes.values import Axes, Concatenation, Dimension, Role, axes_of
from whale.errors import PlanError
from whale.ir.division import divide
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import BATCH, Shard
from whale.runtime.program.shard.slots import Slots
from whale.sharding.index_sets import Runs, axis_sizes, count, extent, index_set, intervals, relative


@dataclass(frozen=True)
class Held:
    """The part of one tensor dimension that a device holds."""

    units: int  # size of the dimension without the rows of the batch
    parts: tuple[Runs, ...]  # per device of the split group, its positions among the units
    position: int  # of this device
    rows_outside: bool  # if the dimension also holds the batch, whether that is the outer factor
    has_rows: bool  # whether it holds the batch

    @property
    def runs(self) -> Runs:
        """This device's positions."""
        return self.parts[self.position]

    @property
    def count(self) -> int:
        """Units that this device holds."""
        return count(self.runs)

    def slots(self, dim: int) -> Slots:
        """The same for a tensor that has it as dimension `dim`."""
        return Slots(dim, self.units, self.parts, self.position, self.rows_outside)


@dataclass(frozen=True)
class ShardLayout:
    """The cuts of a stage, for one device."""

    model: ModelGraph
    axes: Axes  # its axes
    shards: tuple[Shard, ...]
    position: int  # of this device in its split group
    ops: Collection[str]  # the calls of the stage; none for a stage that another capture leaves without ops
    num_rows: int = 0  # rows of the group, where the batch is cut

    @cached_property
    def labels(self) -> Labels:
        """Along which axis each op works."""
        return Labels(self.model, self.axes, frozenset(self.ops), self.shards)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of all axes; of the batch, this device's rows."""
        sizes = axis_sizes(self.axes)
        return {**sizes, BATCH: self.num_rows} if self.num_rows else sizes

    @cached_property
    def _intervals(self) -> tuple[dict[str, tuple[int, int]], ...]:
        known = [self._with_rows(shard) for shard in self.shards]
        return tuple(intervals(known, position) for position in range(len(self.shards[0].sizes) if self.shards else 1))

    def _with_rows(self, shard: Shard) -> Shard:
        return Shard(BATCH, divide(self.num_rows, shard.sizes, minimum=1)) if shard.axis == BATCH else shard

    def dimensions(self, op: str, result: int = 0) -> tuple[Dimension, ...]:
        """The dimensions of one result of an op."""
        return self.axes.ops[op].outputs[result]

    def role(self, op: str, axis: str) -> Role:
        """What an op does with an axis."""
        return self.axes.ops[op].roles[axis]

    def held(self, dimension: Dimension, *shard: str) -> Held:
        """What this device holds of a dimension of which the axes `shard` are cut."""
        rest, rows_outside = dimension, True
        is_product = BATCH in dimension and BATCH not in shard
        if is_product:
            at = dimension.index(BATCH)
            before, after = dimension[:at], dimension[at + 1 :]
            rows_outside = not any(axis in shard for axis in axes_of(before))
            rest = after if rows_outside else before
        parts = tuple(self._index_set(rest, {axis: held[axis] for axis in shard}) for held in self._intervals)
        return Held(extent(rest, self.sizes), parts, self.position, rows_outside, is_product)

    def _index_set(self, dimension: Dimension, held: Mapping[str, tuple[int, int]]) -> Runs:
        return index_set(dimension, self.sizes, held, self.axes.folded)

    def slots(self, op: str, axis: str) -> Slots:
        """Where the parts of an op's result are that is cut along an axis."""
        dimensions = self.dimensions(op)
        dim = next(index for index, dimension in enumerate(dimensions) if axis in axes_of(dimension))
        return self.held(dimensions[dim], axis).slots(dim)

    def _rows_lie_between(self, op: str, source: str, target: str) -> bool:
        """Whether two axes are in one dimension of a tensor, on either side of the batch."""
        for dimension in self.dimensions(op):
            if BATCH in dimension and {source, target} <= set(axes_of(dimension)) and BATCH not in (source, target):
                before = axes_of(dimension[: dimension.index(BATCH)])
                return (source in before) != (target in before)
        return False

    def exchange(self, op: str, source: str, target: str) -> tuple[Slots, Slots]:
        """What leaves the part cut along one axis, and what arrives in the part cut along another."""
        leaving, arriving = self.slots(op, target), self.slots(op, source)
        if leaving.dim != arriving.dim or self._rows_lie_between(op, source, target):
            return leaving, arriving
        return self._within(op, leaving.dim, source, target), self._within(op, leaving.dim, target, source)

    def _within(self, op: str, dim: int, mine: str, others: str) -> Slots:
        """Places, in the own part along one axis, of the devices' parts along another, both in one dimension."""
        dimension, rows_outside = self.dimensions(op)[dim], True
        if BATCH in dimension and BATCH not in (mine, others):  # the number of rows is unknown, and not needed
            rows_outside = self.held(dimension, mine).rows_outside
            dimension = self._beside_rows(dimension, rows_outside)
        held = self._intervals[self.position][mine]
        own = self._index_set(dimension, {mine: held})
        both = [self._index_set(dimension, {mine: held, others: device[others]}) for device in self._intervals]
        return Slots(dim, count(own), tuple(relative(runs, own) for runs in both), self.position, rows_outside)

    @staticmethod
    def _beside_rows(dimension: Dimension, rows_outside: bool) -> Dimension:
        at = dimension.index(BATCH)
        return dimension[at + 1 :] if rows_outside else dimension[:at]

    def faults(self, ops: Sequence[str]) -> list[PlanError]:
        """Why these ops cannot be cut so, as errors at the user's lines."""
        found = [fault for shard in self.shards if (fault := self._shard_fault(shard)) is not None]
        if not found:
            found += self.labels.faults()
        for name in ops:
            if name in self.axes.ops and (fault := self._rows_fault(self.model.by_name[name])) is not None:
                found.append(fault)
        return found

    def _shard_fault(self, shard: Shard) -> PlanError | None:
        known = self.axes.by_name.get(shard.axis)
        if known is None:
            return PlanError(f"the cut names {shard.axis!r}, which is not an axis of the model")
        if shard.axis == BATCH and not self.num_rows:
            return PlanError("a split cannot cut the batch; replicate does")
        if shard.axis != BATCH and sum(shard.sizes) != known.size:
            return PlanError(f"the sizes of cut {shard} add up to {sum(shard.sizes)}, not the {known.size} of {shard.axis}")
        if len(shard.sizes) != len(self.shards[0].sizes):
            return PlanError(f"cuts {shard} and {self.shards[0]} of one stage have different numbers of sizes")
        if min(shard.sizes) < 1:
            return PlanError(f"cut {shard} gives a device of the split group nothing")
        return None

    def _rows_fault(self, op: Op) -> PlanError | None:
        axis = self.labels.held(op.name)
        if axis is None or axis == BATCH:
            return None
        for dimensions in self.axes.ops[op.name].outputs:
            for dimension in dimensions:
                if axis in axes_of(dimension) and any(_mixes_rows(factor) for factor in dimension):
                    return PlanError(f"{op.target} (%{op.name}) joins the batch and {axis} in one dimension", where=op.where)
        return None


def _mixes_rows(factor: object) -> bool:
    return isinstance(factor, Concatenation) and any(BATCH in axes_of(piece) for piece in factor.pieces)
