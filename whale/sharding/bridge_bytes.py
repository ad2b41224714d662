"""What moves at a bridge: bytes that the devices of a split group receive, forward and backward, exact for uneven cuts.

They are the elements that the steps of `reshard` put on the links. Combined losses and means move a few numbers per row instead
of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from whale.axes.values import Axes, Dimension, axes_of, renamed
from whale.ir.division import divide
from whale.ir.graph import DTYPE_BYTES, ModelGraph, Op
from whale.ir.plan import BATCH, Shard
from whale.sharding.bridges import Bridge, Ends
from whale.sharding.index_space import IndexSpace
from whale.sharding.regions import Region
from whale.sharding.reshard import reshard
from whale.sharding.sharding import Sharding

GATHERED = frozenset({"softmax", "prod"})
"""Ways to combine that every device does for itself, from numbers of all devices."""

COUNT_BYTES = DTYPE_BYTES["int64"]


def bridge_bytes(bridge: Bridge, graph: ModelGraph, axes: Axes, shards: Sequence[Shard], rows: int) -> tuple[tuple[int, int], ...]:
    """Bytes that each device of a split group receives per micro-batch, forward and backward.

    Args:
        bridge: of a stage.
        graph: the model.
        axes: its axes.
        shards: of the stage.
        rows: of a micro-batch that the group takes.
    """
    width = len(shards[0].sizes)
    sum_factor = sum_share(bridge, graph, axes) if bridge.is_sum else 1.0
    forward, backward = [0.0] * width, [0.0] * width
    for spec, dimensions in zip(graph.by_name[bridge.tensor].outputs, axes.ops[bridge.tensor].outputs, strict=True):
        names = {axis: str(number) for number, axis in enumerate(dict.fromkeys(axis for each in dimensions for axis in axes_of(each)))}
        sizes = tuple(axes.by_name[axis].size * rows // graph.num_rows if axis == BATCH else axes.by_name[axis].size for axis in names)
        held = tuple((names[shard.axis], _at_rows(shard, rows)) for shard in shards if shard.axis in names)
        form = replace(bridge, tensor="", users=(), source=names.get(bridge.source or ""), target=names.get(bridge.target or ""))
        num_elements, there, back = _received_by_form(form, renamed(dimensions, names), sizes, held, width)
        num_bytes = prod(spec.shape_at(rows)) * DTYPE_BYTES[spec.dtype]
        scale = num_bytes / max(1, num_elements)  # an unknown dimension is as large as the rows make it
        for device in range(width):
            from_all = bridge.combine in GATHERED
            forward[device] += sum_factor * (num_bytes * (width - 1) if from_all else scale * there[device])
            backward[device] += scale * back[device]
    return tuple((round(one), round(other)) for one, other in zip(forward, backward, strict=True))


@lru_cache(maxsize=4096)
def _received_by_form(
    form: Bridge, dimensions: tuple[Dimension, ...], sizes: tuple[int, ...], held: tuple[tuple[str, tuple[int, ...]], ...], width: int
) -> tuple[int, list[float], list[float]]:
    """Elements of a whole tensor, and those that arrive at each device forward and backward; its axes go by their numbers."""
    space = IndexSpace(dimensions, {str(number): size for number, size in enumerate(sizes)})
    regions = {axis: Sharding.along(range(width), axis, own).regions for axis, own in held}
    there = _received(form.values(regions, width), space, width)
    back = _received(form.gradients(regions, width), space, width) if form.has_gradient else [0.0] * width
    return space.num_elements(Region()), there, back


def _received(ends: Ends, space: IndexSpace, width: int) -> list[float]:
    """Elements that arrive at each device."""
    found = [0.0] * width
    for step in reshard(*ends):
        for (_, device), count in step.elements(space).items():
            found[device] += count
    return found


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


def _at_rows(shard: Shard, rows: int) -> tuple[int, ...]:
    return divide(rows, shard.sizes, minimum=1) if shard.axis == BATCH else shard.sizes
