"""The tensors that cross the stages of a replica: which regions go from which rank to which for a micro-batch, and back."""

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
    """A region of one boundary tensor, or of its gradient, from one rank to another (or to itself)."""

    tensor: str  # op name
    channel: Channel  # between world ranks
    region: Region  # of the micro-batch's tensor


@dataclass(frozen=True)
class Boundary:
    """All copies of one replica."""

    plan: Plan
    replica: Replica
    model: ModelGraph
    world_ranks: tuple[int, ...]  # per rank of the plan, the rank in the world
    axes: Axes | None = None  # of the model; needed where tensors cross cut along another axis than the batch

    def copies(self, number: int, num_rows: int, direction: Direction) -> tuple[Copy, ...]:
        """The copies of edge `number` of the replica for a micro-batch of `num_rows` rows, in the order that both ends use."""
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
        """A rank's region of a tensor, or of its gradient, on a stage at an end of an edge."""
        return self._crossings.value(edge, stage, tensor, num_rows).held[rank]

    def space(self, tensor: str, num_rows: int) -> IndexSpace:
        """The index space of a micro-batch's tensor."""
        if any(stage.border_shard(tensor) for stage in self.replica.stages):
            assert self.axes is not None, f"%{tensor} crosses in parts of an axis whose place in it is not known"
            return shard_space(self.axes.ops[tensor].outputs[0], {axis.name: axis.size for axis in self.axes.axes}, num_rows)
        return row_space(self.model.by_name[tensor].outputs[0], self._batch_axes.get(tensor), num_rows)

    def local_rows(self, stage: int, position: int, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch that one device of a stage holds."""
        return self.replica.stages[stage].row_intervals(num_rows)[position]
