"""Bridges inside a split stage: collectives between the layout in which an op makes a tensor and the one in which others use it.

                            used whole        used whole by parts     used cut along b
    whole                   nothing           nothing                 slice
                            - nothing         - all-reduce            - all-gather
    cut along a             all-gather        all-gather              all-to-all (nothing if a is b)
                            - slice           - reduce-scatter        - all-to-all
    sum over the group      all-reduce        (as whole)              reduce-scatter
                            - nothing                                 - all-gather
The second lines are the backward pass. "By parts": the user works on parts of an axis that the tensor lacks, so that its
gradients are terms of a sum. Both follow from `reshard`. Users of one layout share a bridge. A gather followed by a cut is
never made: each layout is made from what the op returned.

The bytes of a bridge are the elements that its steps put on the links, exact for uneven cuts. Combined losses and means send
a few numbers per row instead of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Literal

from whale.axes.labels import Labels, Use
from whale.axes.values import Axes, Dimension, axes_of, renamed
from whale.ir.division import divide
from whale.ir.graph import DTYPE_BYTES, ModelGraph, Op, TensorSpec
from whale.ir.plan import BATCH, Shard
from whale.sharding.index_sets import IndexSpace
from whale.sharding.reshard import Kind, reshard
from whale.sharding.sharding import Region, Sharding

Transport = Kind | Literal[""]
"""Nothing, or a kind of step."""

ON_THE_SPOT: frozenset[Transport] = frozenset({"", "slice"})
"""Transports without communication."""

Ends = tuple[Sharding, Sharding]
"""Before and after."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """One tensor of a stage, in one layout of its users."""

    tensor: str  # the op that makes it
    source: str | None  # the axis along which it is cut; None where it is whole (or a sum, if `is_sum`)
    target: str | None  # the axis along which its users need it cut; None where they need it whole
    entered: bool = False  # whether the users work on parts of an axis that it lacks
    is_sum: bool = False  # whether the op's result is still to be summed over the group
    users: tuple[str, ...] = ()  # ops that need this layout; empty for the sum itself
    has_gradient: bool = True
    combine: str = ""  # for a sum, how partial results are combined (`whale.axes.Role`)

    @property
    def forward(self) -> Transport:
        return _transports(self.source is not None, self.target is not None, self.source == self.target, self.entered, self.is_sum)[0]

    @property
    def backward(self) -> Transport:
        known = _transports(self.source is not None, self.target is not None, self.source == self.target, self.entered, self.is_sum)
        return known[1] if self.has_gradient else ""

    def values(self, regions: Mapping[str, Sequence[Region]], width: int) -> Ends:
        """Shardings of the tensor before and after; `regions` gives, per axis of the tensor, the region of each device of the group."""
        devices = range(width) if self.is_sum else ()
        return _lies(self.source, regions, width, devices), _lies(self.target, regions, width)

    def gradients(self, regions: Mapping[str, Sequence[Region]], width: int) -> Ends:
        """Shardings of its gradient before and after, from the arguments of `values`."""
        devices = range(width) if self.entered else ()
        return _lies(self.target, regions, width, devices), _lies(self.source, regions, width)

    def __str__(self) -> str:
        source = "sum" if self.is_sum else f"cut {self.source}" if self.source else "whole"
        target = f"cut {self.target}" if self.target else "whole by parts" if self.entered else "whole"
        return f"{self.tensor}: {source} -> {target}  {self.forward or 'nothing'} / {self.backward or 'nothing'}"


def _lies(axis: str | None, regions: Mapping[str, Sequence[Region]], width: int, terms: Iterable[int] = ()) -> Sharding:
    """Cut along the axis, or whole if the tensor lacks it."""
    return Sharding(tuple(range(width)), tuple(regions.get(axis or "", (Region(),) * width)), tuple(terms))


@cache
def _transports(is_sharded: bool, wants_shards: bool, is_same: bool, entered: bool, is_sum: bool) -> tuple[Transport, Transport]:
    """The transports of all bridges of one layout, worked out for two devices and axes of two units."""
    target = "a" if is_same else "b"
    bridge = Bridge("", "a" if is_sharded else None, target if wants_shards else None, entered, is_sum)
    regions = {axis: Sharding.along(range(2), axis, (1, 1)).regions for axis in ("a", "b")}
    there, back = reshard(*bridge.values(regions, 2)), reshard(*bridge.gradients(regions, 2))
    return there[0].kind if there else "", back[0].kind if back else ""


def find_bridges(labels: Labels, returned: frozenset[str] = frozenset()) -> tuple[Bridge, ...]:
    """All bridges of a stage at which something moves, in graph order of the tensors.

    Gradients of parameters that every user reads whole while working on parts are not here: they are summed once per step.

    Args:
        returned: values that leave the stage; they are made whole.
    """
    users: dict[tuple[str, Use], list[str]] = {}
    for op in labels.calls:
        for operand in _tensors(labels, op):
            users.setdefault((operand, labels.use(op.name, operand)), []).append(op.name)
    for name in returned:
        users.setdefault((name, labels.returned(name)), [])
    found = [*_sums(labels), *_between(labels, users)]
    return tuple(sorted(found, key=lambda bridge: labels.graph.position[bridge.tensor]))


def _tensors(labels: Labels, op: Op) -> Iterator[str]:
    """The operands of an op that are single tensors."""
    if op.target != "operator.getitem":
        yield from (name for name in op.inputs if len(labels.graph.by_name[name].outputs) == 1)


def _sums(labels: Labels) -> Iterator[Bridge]:
    for op in labels.calls:
        if labels.is_summed(op.name):
            combine = labels.axes.ops[op.name].roles[labels.work[op.name]].combine
            yield Bridge(op.name, None, labels.scattered.get(op.name), is_sum=True, has_gradient=op.requires_grad, combine=combine)


def _between(labels: Labels, users: dict[tuple[str, Use], list[str]]) -> Iterator[Bridge]:
    synchronized = frozenset(labels.synchronized)
    for (tensor, use), ops in users.items():
        op = labels.graph.by_name[tensor]
        gradient = op.requires_grad and any(labels.graph.by_name[user].requires_grad for user in ops or [tensor])
        gradient = gradient and tensor not in synchronized
        bridge = Bridge(tensor, labels.held(tensor), use.axis, use.entered, False, tuple(ops), gradient)
        if bridge.forward or bridge.backward:
            yield bridge


GATHERED = frozenset({"softmax", "prod"})
"""Ways to combine in which every device gathers the numbers of all devices and combines them itself."""

COUNT_BYTES = DTYPE_BYTES["int64"]


def bridge_bytes(bridge: Bridge, graph: ModelGraph, axes: Axes, shards: Sequence[Shard], rows: int) -> tuple[tuple[int, int], ...]:
    """Bytes that each device of a split group receives per micro-batch of `rows` rows, forward and backward."""
    width = len(shards[0].sizes)
    summed, share = summed_size(bridge, graph, axes) if bridge.is_sum else (bridge.tensor, 1.0)
    from_each = share * sum(_num_bytes(spec, rows) for spec in graph.by_name[summed].outputs)
    forward, backward = [0.0] * width, [0.0] * width
    for spec, dimensions in zip(graph.by_name[bridge.tensor].outputs, axes.ops[bridge.tensor].outputs, strict=True):
        names = {axis: str(number) for number, axis in enumerate(dict.fromkeys(axis for each in dimensions for axis in axes_of(each)))}
        sizes = tuple(axes.by_name[axis].size * rows // graph.num_rows if axis == BATCH else axes.by_name[axis].size for axis in names)
        held = tuple((names[shard.axis], _at_rows(shard, rows)) for shard in shards if shard.axis in names)
        form = replace(bridge, tensor="", users=(), source=names.get(bridge.source or ""), target=names.get(bridge.target or ""))
        num_elements, there, back = _received_by_form(form, renamed(dimensions, names), sizes, held, width)
        scale = _num_bytes(spec, rows) / max(1, num_elements)  # an unknown dimension is as large as the rows make it
        for device in range(width):
            forward[device] += from_each * (width - 1) if bridge.combine in GATHERED else share * scale * there[device]
            backward[device] += scale * back[device]
    return tuple((round(one), round(other)) for one, other in zip(forward, backward, strict=True))


@lru_cache(maxsize=4096)
def _received_by_form(
    form: Bridge, dimensions: tuple[Dimension, ...], sizes: tuple[int, ...], held: tuple[tuple[str, tuple[int, ...]], ...], width: int
) -> tuple[int, list[float], list[float]]:
    """Elements of the whole tensor, and those that each device receives forward and backward. Axes are named by number, for the cache."""
    space = IndexSpace(dimensions, {str(number): size for number, size in enumerate(sizes)})
    regions = {axis: Sharding.along(range(width), axis, own).regions for axis, own in held}
    there = _received(form.values(regions, width), space, width)
    back = _received(form.gradients(regions, width), space, width) if form.has_gradient else [0.0] * width
    return space.num_elements(Region()), there, back


def _received(ends: Ends, space: IndexSpace, width: int) -> list[float]:
    found = [0.0] * width
    for step in reshard(*ends):
        for (_, device), count in step.elements(space).items():
            found[device] += count
    return found


def _num_bytes(spec: TensorSpec, rows: int) -> int:
    return prod(spec.shape_at(rows)) * DTYPE_BYTES[spec.dtype]


def summed_size(bridge: Bridge, graph: ModelGraph, axes: Axes) -> tuple[str, float]:
    """What is summed, in multiples of the size of a tensor, whatever the rows: that tensor, and the multiple.

    A weighted mean also sums its weight; an extreme with a gradient also sums the number of ties; a cross-entropy gathers three
    numbers per target.
    Raises KeyError if the tensor is no sum.
    """
    op = graph.by_name[bridge.tensor]
    if bridge.combine == "softmax":
        size = next(axes.by_name[axis].size for axis, role in axes.ops[op.name].roles.items() if role.combine == "softmax")
        return op.inputs[0], 3 / size
    if bridge.combine == "weighted_mean":
        return op.name, 1 + _weight_bytes(op, graph) / DTYPE_BYTES[op.outputs[0].dtype]
    if bridge.combine in ("max", "min") and bridge.has_gradient:
        return op.name, 2 + COUNT_BYTES / DTYPE_BYTES[op.outputs[0].dtype]
    return op.name, 1.0


def _weight_bytes(op: Op, graph: ModelGraph) -> int:
    """Bytes of the divisor of a mean loss: a count where there are no weights; none for probabilities, where it is known."""
    _, target, *weight = (graph.by_name[name].outputs[0] for name in op.inputs)
    if target.dtype.startswith(("float", "bfloat")):
        return 0
    return DTYPE_BYTES[weight[0].dtype] if weight else COUNT_BYTES


def _at_rows(shard: Shard, rows: int) -> tuple[int, ...]:
    return divide(rows, shard.sizes, minimum=1) if shard.axis == BATCH else shard.sizes
