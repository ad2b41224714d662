"""The tensors that cross stages, seen from one rank: which slices to send and receive for a micro-batch.

    stage 0 (5:3 rows)         stage 1 (8 rows)
    rank 0 [0 .. 5)  ---------->  rank 2 [0 .. 5)
    rank 1 [5 .. 8)  ---------->  rank 2 [5 .. 8)

Gradients take the same copies backwards. A tensor without a batch axis is whole on every device: each target takes it
from one source, so the partial gradients of all targets arrive once and gradient synchronisation adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from whale.comm import Lane
from whale.ir.graph import ModelGraph, TensorSpec
from whale.ir.layout import BATCH, Layout, Region, transfers
from whale.ir.plan import BatchAxis, Edge, Plan, Replica


@dataclass(frozen=True, slots=True)
class Copy:
    """A slice of one boundary tensor between this rank and another (or itself).

    Attributes:
        tensor: op name.
        lane: from the source's rank to the target's, in forward direction.
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
    """

    plan: Plan
    replica: Replica
    model: ModelGraph
    world_ranks: tuple[int, ...]

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

    def copies(self, num_rows: int) -> tuple[tuple[Edge, tuple[Copy, ...]], ...]:
        """Per edge, its copies for a micro-batch of this many rows, in the order both ends use."""
        return _copies(self, num_rows)

    def edge(self, lane: Lane) -> Edge:
        """The edge that a forward lane belongs to."""
        return self.replica.edges[lane.number // 2]

    def is_local(self, edge: Edge) -> bool:
        """Whether both stages of an edge run on one virtual device, so that no SEND or RECV stands in the schedule."""
        return self.plan.stage_rank[edge.source] == self.plan.stage_rank[edge.target]

    def local_rows(self, stage: int, position: int, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch that one device of a stage holds."""
        sizes = self.replica.stages[stage].rows(num_rows)
        return sum(sizes[:position]), sum(sizes[: position + 1])

    def __hash__(self) -> int:
        return id(self)


@cache
def _copies(boundary: Boundary, num_rows: int) -> tuple[tuple[Edge, tuple[Copy, ...]], ...]:
    axes = dict(boundary.plan.batch_axes)
    result = []
    for number, edge in enumerate(boundary.replica.edges):
        sources, targets = boundary._ranks(edge.source), boundary._ranks(edge.target)
        found: list[Copy] = []
        for tensor in edge.tensors:
            for transfer in _tensor_transfers(boundary, edge, tensor, axes, num_rows):
                lane = Lane(sources[transfer[0]], targets[transfer[1]], 2 * number)
                interval = transfer[2].interval(BATCH)
                found.append(Copy(tensor, lane, *(interval or (None, None))))
        result.append((edge, tuple(found)))
    return tuple(result)


def _tensor_transfers(
    boundary: Boundary, edge: Edge, tensor: str, axes: Mapping[str, BatchAxis], num_rows: int
) -> Iterator[tuple[int, int, Region]]:
    source, target = boundary.replica.stages[edge.source], boundary.replica.stages[edge.target]
    num_sources, num_targets = len(source.virtual_device.devices), len(target.virtual_device.devices)
    if boundary.model.by_name[tensor].outputs[0].has_rows and (num_sources > 1 or num_targets > 1):
        assert tensor in axes, f"%{tensor} crosses unlike stages without a known batch axis"
        layouts = Layout.cut(BATCH, source.rows(num_rows)), Layout.cut(BATCH, target.rows(num_rows))
    else:
        layouts = Layout.whole(num_sources), Layout.whole(num_targets)
    for transfer in transfers(*layouts):
        yield transfer.source, transfer.target, transfer.region


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
