"""The model as one device of a split group sees it: its part of every tensor, and of every op's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from whale.axes import Axes, Dimension
from whale.axes.values import Concatenation, Factor
from whale.ir.graph import ModelGraph, Op, Parameter, TensorSpec
from whale.ir.plan import Cut

Sizes = Mapping[str, int]
"""Per cut axis, the units that a device has of it."""


def sizes_at(cuts: Sequence[Cut], position: int) -> dict[str, int]:
    """What a device has of each cut axis."""
    return {cut.axis: cut.sizes[position] for cut in cuts}


def local_graph(graph: ModelGraph, axes: Axes, ops: Sequence[str], sizes: Sizes) -> ModelGraph:
    """The graph with the local shapes and FLOPs of the ops of one stage, and of the parameters that they read.

    Ops outside the stage stay as they are. The result is for pricing: arguments keep the whole sizes.
    """
    members = set(ops)
    read = {name for op in ops for name in graph.by_name[op].inputs if graph.by_name[name].kind != "call"}
    made = tuple(_local_op(op, axes, sizes) if op.name in members or op.name in read else op for op in graph.ops)
    held = {graph.parameter_by_name[graph.by_name[name].target].name for name in read if _is_held(graph.by_name[name])}
    parameters = tuple(_local_parameter(each, axes, sizes) if each.name in held else each for each in graph.parameters)
    return replace(graph, ops=made, parameters=parameters)


def _is_held(op: Op) -> bool:
    return op.kind in ("parameter", "buffer")


def _local_op(op: Op, axes: Axes, sizes: Sizes) -> Op:
    known = axes.ops.get(op.name)
    cut = next((axis for axis in known.roles if axis in sizes), None) if known else None
    if known is None or (cut is None and op.kind == "call"):
        return op
    outputs = tuple(local_spec(spec, dims, axes, sizes) for spec, dims in zip(op.outputs, known.outputs, strict=True))
    if cut is None:
        return replace(op, outputs=outputs)
    share = sizes[cut] / axes.by_name[cut].size
    return replace(op, outputs=outputs, forward_flops=round(op.forward_flops * share), backward_flops=round(op.backward_flops * share))


def _local_parameter(parameter: Parameter, axes: Axes, sizes: Sizes) -> Parameter:
    return replace(parameter, spec=local_spec(parameter.spec, axes.parameters[parameter.name], axes, sizes))


def local_spec(spec: TensorSpec, dimensions: Sequence[Dimension], axes: Axes, sizes: Sizes) -> TensorSpec:
    """The spec of a device's part of a tensor."""
    shape = tuple(
        size * _extent(dimension, axes, sizes) // max(1, _extent(dimension, axes, {}))
        for size, dimension in zip(spec.shape, dimensions, strict=True)
    )
    return spec if shape == spec.shape else replace(spec, shape=shape)


def _extent(dimension: Dimension, axes: Axes, sizes: Sizes) -> int:
    return prod(_size(factor, axes, sizes) for factor in dimension)


def _size(factor: Factor, axes: Axes, sizes: Sizes) -> int:
    if isinstance(factor, Concatenation):
        return sum(_extent(piece, axes, sizes) for piece in factor.pieces)
    return sizes.get(factor, axes.by_name[factor].size)
