"""What crosses between two stages for one micro-batch: how many bytes from which device to which."""

from __future__ import annotations

from dataclasses import dataclass, field

from whale.ir.graph import ModelGraph, TensorSpec
from whale.ir.plan import Edge, Shard, Stage
from whale.sharding import moves
from whale.sharding.borders import border_gradient, border_sharding


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one device hands to another; both by position in their virtual devices.

    Attributes:
        num_bytes: of all tensors together.
        num_messages: one per tensor.
    """

    source: int
    target: int
    num_bytes: float
    num_messages: int


@dataclass(frozen=True, slots=True)
class _End:
    """A stage as a boundary sees it: equal ends hand over equally."""

    shares: tuple[int, ...]
    split: int
    shards: tuple[Shard, ...]
    first: int  # number of its first device; stages of one virtual device have equal ones


@dataclass(eq=False)
class Crossings:
    """The crossings of one graph's tensors; equal questions are answered once."""

    graph: ModelGraph
    _known: dict[tuple[_End, _End, tuple[str, ...], int, bool], tuple[Crossing, ...]] = field(default_factory=dict, init=False)

    def of(self, edge: Edge, stages: tuple[Stage, ...], num_rows: int, *, backward: bool) -> tuple[Crossing, ...]:
        """What crosses an edge.

        Args:
            stages: of the replica.
            num_rows: of the micro-batch.
            backward: gradients, from the edge's target to its source.
        """
        source, target = stages[edge.source], stages[edge.target]
        first = 0 if source.virtual_device == target.virtual_device else len(source.virtual_device.devices)
        ends = _End(source.shares, source.split, source.shards, 0), _End(target.shares, target.split, target.shards, first)
        key = *ends, edge.tensors, num_rows, backward
        if key not in self._known:
            self._known[key] = self._find(edge.tensors, (source, 0), (target, first), num_rows, backward)
        return self._known[key]

    def _find(
        self, tensors: tuple[str, ...], source: tuple[Stage, int], target: tuple[Stage, int], num_rows: int, backward: bool
    ) -> tuple[Crossing, ...]:
        found: dict[tuple[int, int], tuple[float, int]] = {}
        ends, how = ((target, source), border_gradient) if backward else ((source, target), border_sharding)
        for tensor in tensors:
            op = self.graph.by_name[tensor]
            if backward and not op.requires_grad:
                continue
            num_bytes = sum(_bytes(spec, num_rows, self.graph.num_rows) for spec in op.outputs)
            rows = num_rows if any(spec.has_rows for spec in op.outputs) else None
            lies = [how(stage, range(first, first + len(stage.virtual_device.devices)), tensor, rows) for stage, first in ends]
            for move in moves(lies[0], lies[1]):
                pair = move.source - ends[0][1], move.target - ends[1][1]
                before = found.get(pair, (0.0, 0))
                found[pair] = before[0] + num_bytes * move.region.volume / lies[0].hull.volume, before[1] + 1
        return tuple(Crossing(*pair, *figures) for pair, figures in sorted(found.items()))


def _bytes(spec: TensorSpec, num_rows: int, planned: int) -> float:
    """Bytes of a tensor at a number of rows; of one that grows with them in an unknown way as if in proportion."""
    return spec.num_bytes * (num_rows / planned if any(spec.row_factors) else 1.0)
