"""What crosses the stages of a replica: the moves from where a tensor, or its gradient, lies on one stage to where on another.

stage 0 (5:3 rows)         stage 1 (8 rows)
rank 0 [0 .. 5)  ---------->  rank 2 [0 .. 5)
rank 1 [5 .. 8)  ---------->  rank 2 [5 .. 8)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from whale.ir.graph import ModelGraph
from whale.ir.plan import BatchAxis, Edge, Replica
from whale.sharding.borders import border_gradient, border_sharding
from whale.sharding.moves import Move, moves
from whale.sharding.sharding import Sharding

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Crossings:
    """What crosses the stages of one replica.

    Args:
        replica: the replica.
        model: specs of the tensors.
        rank_of: the rank of each of its devices, in any numbering that the caller likes.
        batch_axes: per tensor, where its batch is.
    """

    replica: Replica
    model: ModelGraph
    rank_of: Mapping[str, int]
    batch_axes: Mapping[str, BatchAxis]

    def moves(self, edge: Edge, num_rows: int, direction: Direction) -> Iterator[tuple[str, Move]]:
        """Per tensor of an edge, in order, which region goes from whom to whom for a micro-batch of this many rows."""
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
        """Where a tensor lies on a stage at an end of an edge."""
        return border_sharding(self.replica.stages[stage], self._ranks[stage], tensor, self._rows(edge, tensor, num_rows))

    def _gradient(self, edge: Edge, stage: int, tensor: str, num_rows: int) -> Sharding:
        return border_gradient(self.replica.stages[stage], self._ranks[stage], tensor, self._rows(edge, tensor, num_rows))

    def _ends(self, edge: Edge, tensor: str, num_rows: int, direction: Direction) -> tuple[Sharding, Sharding]:
        if direction == "forward":
            return self.value(edge, edge.source, tensor, num_rows), self.value(edge, edge.target, tensor, num_rows)
        return self._gradient(edge, edge.target, tensor, num_rows), self._gradient(edge, edge.source, tensor, num_rows)

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the ranks of its virtual device."""
        return tuple(tuple(self.rank_of[device] for device in stage.virtual_device.devices) for stage in self.replica.stages)

    def _rows(self, edge: Edge, tensor: str, num_rows: int) -> int | None:
        """The rows that divide a tensor; None where it is handed over whole, as between single devices, wherever its rows are."""
        is_known = tensor in self.batch_axes
        is_wide = any(len(self._ranks[end]) > 1 for end in (edge.source, edge.target))
        has_rows = self.model.by_name[tensor].outputs[0].has_rows
        assert is_known or not (is_wide and has_rows), f"%{tensor} crosses unlike stages without a known batch axis"
        return num_rows if has_rows and is_known else None
