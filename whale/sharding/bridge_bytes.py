"""What moves at a bridge: bytes that one device of a split group receives, forward and backward, exact for uneven cuts.

A tensor of N elements, of which device i holds n_i before and m_i after; t devices:

    all-gather        N - n_i               what it does not have
    all-to-all        m_i - what it has of it already
    reduce-scatter    m_i (t - 1)           its part, from each of the others
    all-reduce        2 N (t - 1) / t       a reduce-scatter and an all-gather in even pieces

Backward the forms change places. Combined losses and means move a few numbers per row instead of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whale.axes.bridges import Bridge, Transport
from whale.axes.values import Axes, Dimension
from whale.ir.division import divide
from whale.ir.graph import DTYPE_BYTES, ModelGraph, Op, TensorSpec
from whale.ir.plan import BATCH, Shard
from whale.sharding.index_sets import Runs, count, index_set, intervals

GATHERED = frozenset({"softmax", "prod"})
"""Ways to combine that every device does for itself, from numbers of all devices."""

COUNT_BYTES = DTYPE_BYTES["int64"]


def bridge_bytes(bridge: Bridge, graph: ModelGraph, axes: Axes, shards: Sequence[Shard], position: int, rows: int) -> tuple[int, int]:
    """Bytes that a device receives per micro-batch, forward and backward.

    Args:
        bridge: of a stage.
        graph: the model.
        axes: its axes.
        shards: of the stage.
        position: of the device in its split group.
        rows: of a micro-batch that the group takes.
    """
    width = len(shards[0].sizes)
    sum_factor = sum_share(bridge, graph, axes) if bridge.is_sum else 1.0
    forward = backward = 0.0
    for spec, dimensions in zip(graph.by_name[bridge.tensor].outputs, axes.ops[bridge.tensor].outputs, strict=True):
        part = _Part(spec, dimensions, axes, graph.num_rows, rows, intervals([_at_rows(shard, rows) for shard in shards], position))
        size = DTYPE_BYTES[spec.dtype]
        if bridge.combine in GATHERED:
            forward += size * part.num_elements * sum_factor * (width - 1)
        else:
            forward += size * _received(bridge.forward, part, bridge.source, bridge.target, width) * sum_factor
        backward += size * _received(bridge.backward, part, bridge.target, bridge.source, width)
    return round(forward), round(backward)


def sum_share(bridge: Bridge, graph: ModelGraph, axes: Axes) -> float:
    """What is summed, in sizes of the result.

    A weighted mean sums its weight too; an extreme that has a gradient, how often it is met; a cross-entropy gathers three numbers
    per target.

    Raises:
        KeyError: the tensor is no sum.
    """
    op = graph.by_name[bridge.tensor]
    if bridge.combine == "softmax":
        rows = graph.by_name[op.inputs[0]].outputs[0]
        size = next(axes.by_name[axis].size for axis, role in axes.ops[op.name].roles.items() if role.combine == "softmax")
        return 3 * (rows.num_elements / size) * DTYPE_BYTES[rows.dtype] / max(1, op.num_bytes)
    if bridge.combine == "weighted_mean":
        return 1 + _weight_bytes(op, graph) / DTYPE_BYTES[op.outputs[0].dtype]
    if bridge.combine in ("max", "min") and bridge.has_gradient:
        return 2 + COUNT_BYTES / DTYPE_BYTES[op.outputs[0].dtype]
    return 1.0


def _weight_bytes(op: Op, graph: ModelGraph) -> int:
    """Bytes of what the mean of a loss is divided by: where there are no weights, a count; of probabilities it is known."""
    _, target, *weight = (graph.by_name[name].outputs[0] for name in op.inputs)
    if target.dtype.startswith(("float", "bfloat")):
        return 0
    return DTYPE_BYTES[weight[0].dtype] if weight else COUNT_BYTES


def _at_rows(shard: Shard, rows: int) -> Shard:
    return Shard(BATCH, divide(rows, shard.sizes, minimum=1)) if shard.axis == BATCH else shard


class _Part:
    """How much of a tensor lies where."""

    def __init__(
        self, spec: TensorSpec, dimensions: Sequence[Dimension], axes: Axes, planned: int, rows: int, held: dict[str, tuple[int, int]]
    ) -> None:
        self._shape = spec.shape_at(rows)
        self._dimensions, self._held = dimensions, held
        self._sizes = {axis.name: axis.size * rows // planned if axis.name == BATCH else axis.size for axis in axes.axes}
        self.num_elements = prod(self._shape)

    def _runs(self, axis: str | None) -> list[Runs]:
        held = {axis: self._held[axis]} if axis else {}
        return [index_set(dimension, self._sizes, held) for dimension in self._dimensions]

    def of(self, axis: str | None) -> float:
        """Elements of the part along an axis; all of them along none."""
        if axis is None:
            return self.num_elements
        whole = [count(runs) for runs in self._runs(None)]
        return prod(
            size * count(runs) / max(1, every) for size, runs, every in zip(self._shape, self._runs(axis), whole, strict=True)
        )  # an unknown dimension is as large as the rows make it

    def common(self, a: str, b: str) -> float:
        """Elements that are in both parts."""
        pairs = zip(self._shape, self._runs(a), self._runs(b), self._runs(None), strict=True)
        return prod(size * _overlap(first, second) / max(1, count(every)) for size, first, second, every in pairs)


def _received(transport: Transport, part: _Part, source: str | None, target: str | None, width: int) -> float:
    """Elements that arrive."""
    if transport == "all-gather":
        return part.num_elements - part.of(source)
    if transport == "all-to-all":
        assert source and target
        return part.of(target) - part.common(source, target)
    if transport == "reduce-scatter":
        return part.of(target) * (width - 1)
    return 2 * part.num_elements * (width - 1) / width if transport == "all-reduce" else 0.0


def _overlap(a: Runs, b: Runs) -> int:
    found = i = j = 0
    while i < len(a) and j < len(b):
        found += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found
