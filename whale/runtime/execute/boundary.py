"""The tensors that cross stages, seen from one replica: which slices go from which rank to which for a micro-batch.

    stage 0 (5:3 rows)         stage 1 (8 rows)
    rank 0 [0 .. 5)  ---------->  rank 2 [0 .. 5)
    rank 1 [5 .. 8)  ---------->  rank 2 [5 .. 8)

Values are final on every device that holds them, and so are the gradients of their rows: backward, every device of the
source takes its rows from one holder among the targets. A tensor without a batch axis is whole on every device. Its
gradient is partial over the target's split groups (each saw other rows): each group's goes to one group of the source,
and gradient synchronisation adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from whale.axes import Axes, axes_of
from whale.comm import Lane
from whale.ir.graph import ModelGraph, TensorSpec
from whale.ir.plan import BATCH, BatchAxis, Edge, Plan, Replica, Stage
from whale.sharding import Region, Sharding, moves
from whale.sharding.index_sets import count, extent, index_set, intervals

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A slice of one boundary tensor, or of its gradient, from one rank to another (or to itself).

    Attributes:
        tensor: op name.
        lane: from the sender's rank to the receiver's.
        start, stop: rows of the micro-batch; None for a tensor without a batch axis.
    """

    tensor: str
    lane: Lane
    start: int | None
    stop: int | None


@dataclass(frozen=True)
class Boundary:
    """All copies of one replica.

    Args:
        plan: the plan.
        replica: the replica this rank belongs to.
        model: specs of the tensors.
        world_ranks: per rank of the plan, the rank in the world.
        axes: of the model; needed where tensors cross in parts of another axis than the batch.
    """

    plan: Plan
    replica: Replica
    model: ModelGraph
    world_ranks: tuple[int, ...]
    axes: Axes | None = None

    def lanes(self) -> Iterator[Lane]:
        """Every lane between two ranks that an edge of this replica can use."""
        for number, edge in enumerate(self.replica.edges):
            for source in self._ranks(edge.source):
                for target in self._ranks(edge.target):
                    if source != target:
                        yield Lane(source, target, 2 * number)
                        yield Lane(target, source, 2 * number + 1)

    def _ranks(self, stage: int) -> tuple[int, ...]:
        devices = self.replica.stages[stage].virtual_device.devices
        return tuple(self.world_ranks[self.plan.rank_of[device]] for device in devices)

    def copies(self, num_rows: int, direction: Direction) -> tuple[tuple[Edge, tuple[Copy, ...]], ...]:
        """Per edge, its copies for a micro-batch of this many rows, in the order both ends use."""
        return _copies(self, num_rows, direction)

    def edge(self, lane: Lane) -> Edge:
        """The edge that a lane belongs to."""
        return self.replica.edges[lane.number // 2]

    def local_rows(self, stage: int, position: int, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch that one device of a stage holds."""
        return self.replica.stages[stage].row_intervals(num_rows)[position]

    def tensor_rows(self, stage: int, tensor: str, position: int, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch that one device of a stage has of a tensor."""
        return self.replica.stages[stage].tensor_intervals(tensor, num_rows)[position]

    def narrowed(self, shape: tuple[int, ...], stage: int, tensor: str, position: int) -> tuple[int, ...]:
        """The shape of what one device of a stage has of a tensor, from that of all of it."""
        held = self.replica.stages[stage]
        shard = held.border_shard(tensor)
        if shard is None:
            return shape
        assert self.axes is not None, f"%{tensor} crosses in parts of {shard.axis}, whose place in it is not known"
        sizes = {axis.name: axis.size for axis in self.axes.axes}
        own = intervals([shard], position % held.split)
        return tuple(
            size * count(index_set(dimension, sizes, own)) // extent(dimension, sizes) if shard.axis in axes_of(dimension) else size
            for size, dimension in zip(shape, self.axes.ops[tensor].outputs[0], strict=True)
        )

    def __hash__(self) -> int:
        return id(self)


@cache
def _copies(boundary: Boundary, num_rows: int, direction: Direction) -> tuple[tuple[Edge, tuple[Copy, ...]], ...]:
    result = []
    for number, edge in enumerate(boundary.replica.edges):
        ends = (edge.source, edge.target) if direction == "forward" else (edge.target, edge.source)
        senders, receivers = boundary._ranks(ends[0]), boundary._ranks(ends[1])
        lane_number = 2 * number + (direction == "backward")
        found: list[Copy] = []
        for tensor in edge.tensors:
            if direction == "backward" and not boundary.model.by_name[tensor].requires_grad:
                continue
            for sender, receiver, region in _transfers(boundary, edge, tensor, num_rows, direction):
                interval = region.interval(BATCH)
                found.append(Copy(tensor, Lane(senders[sender], receivers[receiver], lane_number), *(interval or (None, None))))
        result.append((edge, tuple(found)))
    return tuple(result)


def _transfers(boundary: Boundary, edge: Edge, tensor: str, num_rows: int, direction: Direction) -> Iterator[tuple[int, int, Region]]:
    """Sender and receiver by position in their virtual devices, and what is copied."""
    source, target = boundary.replica.stages[edge.source], boundary.replica.stages[edge.target]
    has_rows = boundary.model.by_name[tensor].outputs[0].has_rows
    if source.border_shard(tensor) is not None:
        yield from _by_position(source, target, tensor, num_rows if has_rows else None, direction)
    elif has_rows and (len(source.virtual_device.devices) > 1 or len(target.virtual_device.devices) > 1):
        assert tensor in dict(boundary.plan.batch_axes), f"%{tensor} crosses unlike stages without a known batch axis"
        ends = (source, target) if direction == "forward" else (target, source)
        for move in moves(_by_rows(ends[0], tensor, num_rows), _by_rows(ends[1], tensor, num_rows)):
            yield move.source, move.target, move.region
    else:
        yield from _whole(source, target, direction)


def _by_rows(stage: Stage, tensor: str, num_rows: int, every: slice = slice(None)) -> Sharding:
    regions = tuple(Region(((BATCH, start, stop),)) for start, stop in stage.tensor_intervals(tensor, num_rows)[every])
    return Sharding(tuple(range(len(regions))), regions)


def _whole(source: Stage, target: Stage, direction: Direction) -> Iterator[tuple[int, int, Region]]:
    """Group by group, each device of the receiving group from the sending one's device of its own position."""
    num_sources, num_targets = len(source.shares), len(target.shares)
    for group in range(num_targets):
        other = group * num_sources // num_targets
        pairs = (other, source.split, group, target.split) if direction == "forward" else (group, target.split, other, source.split)
        sending, sending_split, receiving, receiving_split = pairs
        for position in range(receiving_split):
            yield sending * sending_split + position % sending_split, receiving * receiving_split + position, Region()


def _by_position(
    source: Stage, target: Stage, tensor: str, num_rows: int | None, direction: Direction
) -> Iterator[tuple[int, int, Region]]:
    """Parts of another axis than the batch: from the devices of each position to those of the same one."""
    ends = (source, target) if direction == "forward" else (target, source)
    for position in range(source.split):
        if num_rows is None:
            for sender, receiver, region in _whole(source, target, direction):
                if sender % source.split == position == receiver % source.split:
                    yield sender, receiver, region
            continue
        before, after = (_by_rows(end, tensor, num_rows, slice(position, None, end.split)) for end in ends)
        for move in moves(before, after):
            yield move.source * source.split + position, move.target * source.split + position, move.region


def rows_slice(tensor: torch.Tensor, axis: BatchAxis, start: int, stop: int) -> torch.Tensor:
    """A view of some rows of a tensor.

    Args:
        tensor: its dimension ``axis.dim`` is outer x rows x inner.
        axis: where the batch is.
        start, stop: rows, counted from the tensor's first.
    """
    inner = axis.inner
    if axis.outer == 1:
        return tensor.narrow(axis.dim, start * inner, (stop - start) * inner)
    rows = tensor.shape[axis.dim] // (axis.outer * inner)
    split = tensor.reshape(*tensor.shape[: axis.dim], axis.outer, rows, inner, *tensor.shape[axis.dim + 1 :])
    return split.narrow(axis.dim + 1, start, stop - start).flatten(axis.dim, axis.dim + 2)


def write_rows(target: torch.Tensor, axis: BatchAxis, start: int, piece: torch.Tensor, *, add: bool = False) -> None:
    """Writes rows into a contiguous tensor, or adds to what is there.

    Args:
        target: its dimension ``axis.dim`` is outer x rows x inner.
        axis: where the batch is.
        start: first row, counted from the tensor's first.
        piece: the rows.
        add: add to what is there.
    """
    inner = axis.inner
    num_rows = piece.shape[axis.dim] // (axis.outer * inner)
    rows = target.shape[axis.dim] // (axis.outer * inner)
    split = target.view(*target.shape[: axis.dim], axis.outer, rows, inner, *target.shape[axis.dim + 1 :])
    place = split.narrow(axis.dim + 1, start, num_rows)
    shaped = piece.reshape(place.shape)
    if add:
        place.add_(shaped)
    else:
        place.copy_(shaped)


def piece_shape(spec: TensorSpec, axis: BatchAxis | None, num_rows: int) -> tuple[int, ...]:
    """Shape of a tensor, or of its piece with this many rows."""
    shape = list(spec.shape_at(num_rows))
    if axis is not None:
        shape[axis.dim] = axis.outer * num_rows * axis.inner
    return tuple(shape)
