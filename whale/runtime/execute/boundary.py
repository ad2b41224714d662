"""The tensors that cross stages, seen from one replica: which regions go from which rank to which for a micro-batch.

    stage 0 (5:3 rows)         stage 1 (8 rows)
    rank 0 [0 .. 5)  ---------->  rank 2 [0 .. 5)
    rank 1 [5 .. 8)  ---------->  rank 2 [5 .. 8)

They are the moves from the tensor's sharding on one stage to that on the other; backward, of its gradient's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from whale.axes import Axes
from whale.comm import Lane
from whale.ir.graph import ModelGraph
from whale.ir.plan import BatchAxis, Edge, Plan, Replica, Stage
from whale.sharding import IndexSpace, Move, Region, Sharding, moves
from whale.sharding.borders import border_gradient, border_sharding, row_space, shard_space

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

_Lies = Callable[[Stage, Sequence[int], str, int | None], Sharding]


@dataclass(frozen=True, slots=True)
class Copy:
    """A region of one boundary tensor, or of its gradient, from one rank to another (or to itself).

    Attributes:
        tensor: op name.
        lane: from the sender's rank to the receiver's.
        region: of the micro-batch's tensor.
    """

    tensor: str
    lane: Lane
    region: Region


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

    def lanes(self, num_rows: int) -> Iterator[Lane]:
        """What the copies of a micro-batch of this many rows travel on."""
        for number in range(len(self.replica.edges)):
            for direction in DIRECTIONS:
                yield from (copy.lane for copy in self.copies(number, num_rows, direction))

    def _ranks(self, stage: int) -> tuple[int, ...]:
        devices = self.replica.stages[stage].virtual_device.devices
        return tuple(self.world_ranks[self.plan.rank_of[device]] for device in devices)

    def copies(self, number: int, num_rows: int, direction: Direction) -> tuple[Copy, ...]:
        """The copies of one edge for a micro-batch of this many rows, in the order both ends use.

        Args:
            number: of the edge in the replica.
            num_rows: of the micro-batch.
            direction: of the values, or of their gradients.
        """
        key = number, num_rows, direction
        if key not in self._copies:
            self._copies[key] = tuple(self._find_copies(*key))
        return self._copies[key]

    @cached_property
    def _copies(self) -> dict[tuple[int, int, Direction], tuple[Copy, ...]]:
        return {}

    def _find_copies(self, number: int, num_rows: int, direction: Direction) -> Iterator[Copy]:
        edge, known = self.replica.edges[number], dict[tuple[Sharding, Sharding], tuple[Move, ...]]()
        for tensor in edge.tensors:
            if direction == "backward" and not self.model.by_name[tensor].requires_grad:
                continue
            ends = self._ends(edge, tensor, num_rows, direction)
            if ends not in known:
                known[ends] = moves(*ends)
            for move in known[ends]:
                yield Copy(tensor, Lane(move.source, move.target), move.region)

    def _ends(self, edge: Edge, tensor: str, num_rows: int, direction: Direction) -> tuple[Sharding, Sharding]:
        if direction == "forward":
            how, first, last = border_sharding, edge.source, edge.target
        else:
            how, first, last = border_gradient, edge.target, edge.source
        return self._lies(how, first, edge, tensor, num_rows), self._lies(how, last, edge, tensor, num_rows)

    def _lies(self, how: _Lies, stage: int, edge: Edge, tensor: str, num_rows: int) -> Sharding:
        rows = num_rows if self._has_rows(edge, tensor) else None
        return how(self.replica.stages[stage], self._ranks(stage), tensor, rows)

    def _has_rows(self, edge: Edge, tensor: str) -> bool:
        """Whether it is divided by rows; between single devices it is handed over whole, wherever its rows are."""
        is_known = tensor in self._batch_axes
        is_wide = any(len(self.replica.stages[end].virtual_device.devices) > 1 for end in (edge.source, edge.target))
        has_rows = self.model.by_name[tensor].outputs[0].has_rows
        assert is_known or not (is_wide and has_rows), f"%{tensor} crosses unlike stages without a known batch axis"
        return has_rows and is_known

    @cached_property
    def _batch_axes(self) -> dict[str, BatchAxis]:
        return dict(self.plan.batch_axes)

    def held(self, edge: Edge, stage: int, tensor: str, rank: int, num_rows: int) -> Region:
        """What a rank of a stage at an end of an edge has of a tensor, or of its gradient."""
        return self._lies(border_sharding, stage, edge, tensor, num_rows).held[rank]

    def space(self, tensor: str, num_rows: int) -> IndexSpace:
        """Where the elements of a micro-batch's tensor lie."""
        if any(stage.border_shard(tensor) for stage in self.replica.stages):
            assert self.axes is not None, f"%{tensor} crosses in parts of an axis whose place in it is not known"
            return shard_space(self.axes.ops[tensor].outputs[0], {axis.name: axis.size for axis in self.axes.axes}, num_rows)
        return row_space(self.model.by_name[tensor].outputs[0], self._batch_axes.get(tensor), num_rows)

    def local_rows(self, stage: int, position: int, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch that one device of a stage holds."""
        return self.replica.stages[stage].row_intervals(num_rows)[position]


def planned_lanes(plan: Plan, model: ModelGraph, world_ranks: tuple[int, ...], axes: Axes | None) -> Iterator[Lane]:
    """What the plan's own batch travels on in training, over all replicas."""
    for replica in plan.replicas:
        boundary = Boundary(plan, replica, model, world_ranks, axes)
        for num_rows in {stop - start for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows)}:
            yield from boundary.lanes(num_rows)
