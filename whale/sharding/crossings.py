"""What crosses the stages of a replica: how a tensor, and its gradient, is laid out on each stage, and the moves between them.

    stage 0 (5:3 rows)            stage 1 (groups of 2, all rows, in parts of hidden)
    rank 0   batch[0:5]           rank 2   batch[0:8] hidden[0:6]
    rank 1   batch[5:8]           rank 3   batch[0:8] hidden[6:8]

Values, and the gradients of their rows, are final on every device that holds them. A tensor without a batch axis is held by every
split group. Its gradient is a sum with one term per group, since each group saw other rows; the terms stay separate on the way back,
and gradient synchronisation adds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from whale.axes.values import Dimension
from whale.ir.division import divide, intervals
from whale.ir.graph import ModelGraph, TensorSpec
from whale.ir.plan import BATCH, BatchAxis, Edge, Replica, Stage
from whale.sharding.index_sets import IndexSpace
from whale.sharding.reshard import Move, moves
from whale.sharding.sharding import Region, Sharding


def border_sharding(stage: Stage, devices: Sequence[int], tensor: str, num_rows: int | None) -> Sharding:
    """The sharding of a tensor that a stage receives or sends.

    Args:
        num_rows: of a micro-batch; None for a tensor without a batch axis.

    Raises:
        ValueError: there is less than one row per device that takes rows of its own.
    """
    held: list[dict[str, tuple[int, int]]] = [{} for _ in devices]
    if num_rows is not None:
        for own, rows in zip(held, _rows(stage, tensor, num_rows), strict=True):
            own[BATCH] = rows
    shard = stage.border_shard(tensor)
    if shard is not None:
        parts = intervals(shard.sizes)
        for index, own in enumerate(held):
            own[shard.axis] = parts[index % stage.split]
    return Sharding(tuple(devices), tuple(map(Region.of, held)))


def border_gradient(stage: Stage, devices: Sequence[int], tensor: str, num_rows: int | None) -> Sharding:
    """The sharding of the gradient of such a tensor; see `border_sharding`."""
    value = border_sharding(stage, devices, tensor, num_rows)
    groups = tuple(index // stage.split for index in range(len(devices)))
    return replace(value, terms=groups) if num_rows is None else value


def _rows(stage: Stage, tensor: str, num_rows: int) -> Sequence[tuple[int, int]]:
    """Per device, its rows: those of its group, or its share of them."""
    whole, shard = stage.row_intervals(num_rows), stage.row_shard
    if shard is None or (tensor not in shard.arriving and tensor not in shard.handed_on):
        return whole
    groups = whole[:: stage.split]
    return [part for start, stop in groups for part in intervals(divide(stop - start, shard.sizes, minimum=1), start)]


def row_space(spec: TensorSpec, axis: BatchAxis | None, num_rows: int) -> IndexSpace:
    """The index space of a tensor of which only the batch axis is known; `axis` is None where it has none, or an ambiguous one."""
    sizes = {f"dim {dim}": size for dim, size in enumerate(spec.shape_at(num_rows))}
    dimensions: list[Dimension] = [(name,) for name in sizes]
    if axis is not None:
        dimensions[axis.dim] = ("outer", BATCH, "inner")
        sizes |= {"outer": axis.outer, BATCH: num_rows, "inner": axis.inner}
    return IndexSpace(tuple(dimensions), sizes)


Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Crossings:
    """What crosses the stages of one replica."""

    replica: Replica
    model: ModelGraph
    rank_of: Mapping[str, int]  # the rank of each of its devices, in any numbering
    batch_axes: Mapping[str, BatchAxis]  # per tensor, where its batch is

    def moves(self, edge: Edge, num_rows: int, direction: Direction) -> Iterator[tuple[str, Move]]:
        """The moves of each tensor of an edge, in order, for a micro-batch of `num_rows` rows."""
        known = dict[tuple[Sharding, Sharding], tuple[Move, ...]]()
        for tensor in edge.tensors:
            if direction == "backward" and not self.model.by_name[tensor].requires_grad:
                continue
            ends = self._ends(edge, tensor, num_rows, direction)
            if ends not in known:
                known[ends] = moves(*ends)
            for move in known[ends]:
                yield tensor, move

    def value(self, edge: Edge, stage: int, tensor: str, num_rows: int) -> Sharding:
        """The sharding of a tensor on a stage at an end of an edge."""
        return border_sharding(self.replica.stages[stage], self._ranks[stage], tensor, self._rows(edge, tensor, num_rows))

    def _gradient(self, edge: Edge, stage: int, tensor: str, num_rows: int) -> Sharding:
        return border_gradient(self.replica.stages[stage], self._ranks[stage], tensor, self._rows(edge, tensor, num_rows))

    def _ends(self, edge: Edge, tensor: str, num_rows: int, direction: Direction) -> tuple[Sharding, Sharding]:
        if direction == "forward":
            return self.value(edge, edge.source, tensor, num_rows), self.value(edge, edge.target, tensor, num_rows)
        return self._gradient(edge, edge.target, tensor, num_rows), self._gradient(edge, edge.source, tensor, num_rows)

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """Per stage."""
        return tuple(tuple(self.rank_of[device] for device in stage.virtual_device.devices) for stage in self.replica.stages)

    def _rows(self, edge: Edge, tensor: str, num_rows: int) -> int | None:
        """The rows that divide a tensor; None where it is sent whole, as between single devices."""
        is_known = tensor in self.batch_axes
        is_wide = any(len(self._ranks[end]) > 1 for end in (edge.source, edge.target))
        has_rows = self.model.by_name[tensor].outputs[0].has_rows
        assert is_known or not (is_wide and has_rows), f"%{tensor} crosses unlike stages without a known batch axis"
        return num_rows if has_rows and is_known else None
