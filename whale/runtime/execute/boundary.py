"""The tensors that cross stages, seen from one replica: which regions go from which rank to which for a micro-batch.

They are the moves from the tensor's sharding on one stage to that on the other; backward, of its gradient's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from whale.axes import Axes
from whale.comm import Channel
from whale.ir.graph import ModelGraph
from whale.ir.plan import BatchAxis, Edge, Plan, Replica
from whale.sharding import IndexSpace, Region
from whale.sharding.crossings import Crossings, Direction, row_space, shard_space


@dataclass(frozen=True, slots=True)
class Copy:
    """A region of one boundary tensor, or of its gradient, from one rank to another (or to itself).

    Attributes:
        tensor: op name.
        channel: from the sender's rank to the receiver's.
        region: of the micro-batch's tensor.
    """

    tensor: str
    channel: Channel
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
        for tensor, move in self._crossings.moves(self.replica.edges[number], num_rows, direction):
            yield Copy(tensor, Channel(move.source, move.target), move.region)

    @cached_property
    def _crossings(self) -> Crossings:
        rank_of = {device: self.world_ranks[rank] for device, rank in self.plan.rank_of.items()}
        return Crossings(self.replica, self.model, rank_of, self._batch_axes)

    @cached_property
    def _batch_axes(self) -> dict[str, BatchAxis]:
        return dict(self.plan.batch_axes)

    def held(self, edge: Edge, stage: int, tensor: str, rank: int, num_rows: int) -> Region:
        """What a rank of a stage at an end of an edge has of a tensor, or of its gradient."""
        return self._crossings.value(edge, stage, tensor, num_rows).held[rank]

    def space(self, tensor: str, num_rows: int) -> IndexSpace:
        """Where the elements of a micro-batch's tensor lie."""
        if any(stage.border_shard(tensor) for stage in self.replica.stages):
            assert self.axes is not None, f"%{tensor} crosses in parts of an axis whose place in it is not known"
            return shard_space(self.axes.ops[tensor].outputs[0], {axis.name: axis.size for axis in self.axes.axes}, num_rows)
        return row_space(self.model.by_name[tensor].outputs[0], self._batch_axes.get(tensor), num_rows)

    def local_rows(self, stage: int, position: int, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch that one device of a stage holds."""
        return self.replica.stages[stage].row_intervals(num_rows)[position]
