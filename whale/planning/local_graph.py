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
    local = _Local(axes, sizes)
    members = set(ops)
    read = {name for op in ops for name in graph.by_name[op].inputs if graph.by_name[name].kind != "call"}
    made = tuple(local.op(op) if op.name in members or op.name in read else op for op in graph.ops)
    held = {graph.parameter_by_name[op.target].name for op in map(graph.by_name.__getitem__, read) if op.kind in ("parameter", "buffer")}
    parameters = tuple(local.parameter(each) if each.name in held else each for each in graph.parameters)
    return replace(graph, ops=made, parameters=parameters)


class _Local:
    """Turns what is whole into the part of one device; every dimension is looked at once."""

    def __init__(self, axes: Axes, sizes: Sizes) -> None:
        self._axes, self._sizes = axes, sizes
        self._shares: dict[Dimension, tuple[int, int] | None] = {}

    def op(self, op: Op) -> Op:
        known = self._axes.ops.get(op.name)
        cut = next((axis for axis in known.roles if axis in self._sizes), None) if known else None
        if known is None or (cut is None and op.kind == "call"):
            return op
        outputs = tuple(self._spec(spec, dims) for spec, dims in zip(op.outputs, known.outputs, strict=True))
        if cut is None:
            return replace(op, outputs=outputs)
        share = self._sizes[cut] / self._axes.by_name[cut].size
        return replace(op, outputs=outputs, forward_flops=round(op.forward_flops * share), backward_flops=round(op.backward_flops * share))

    def parameter(self, parameter: Parameter) -> Parameter:
        spec = self._spec(parameter.spec, self._axes.parameters[parameter.name])
        return parameter if spec is parameter.spec else replace(parameter, spec=spec)

    def _spec(self, spec: TensorSpec, dimensions: Sequence[Dimension]) -> TensorSpec:
        shares = [self._share(dimension) for dimension in dimensions]
        if not any(shares):
            return spec
        return replace(spec, shape=tuple(size * s[0] // s[1] if s else size for size, s in zip(spec.shape, shares, strict=True)))

    def _share(self, dimension: Dimension) -> tuple[int, int] | None:
        """What of a dimension is held: so many of so many; None for all of it."""
        if dimension not in self._shares:
            held, whole = self._extent(dimension, self._sizes), self._extent(dimension, {})
            self._shares[dimension] = None if held == whole else (held, whole)
        return self._shares[dimension]

    def _extent(self, dimension: Dimension, sizes: Sizes) -> int:
        return prod(self._size(factor, sizes) for factor in dimension)

    def _size(self, factor: Factor, sizes: Sizes) -> int:
        if isinstance(factor, Concatenation):
            return sum(self._extent(piece, sizes) for piece in factor.pieces)
        return sizes.get(factor, self._axes.by_name[factor].size)
