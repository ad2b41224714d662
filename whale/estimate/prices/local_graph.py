"""The model as one device of a split group holds it: its part of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from whale.axes import Axes, Dimension
from whale.axes.labels import Labels
from whale.axes.values import Concatenation, Factor
from whale.ir.graph import ModelGraph, Op, Parameter, TensorSpec
from whale.ir.plan import BATCH


def local_graph(labels: Labels, parts: Mapping[str, tuple[int, int]]) -> ModelGraph:
    """The graph with the local shapes of the results of one stage's ops, and of the parameters that they read.

    Ops outside the stage stay as they are. The result is for pricing memory: arguments and FLOPs are those of the whole
    (`whale.estimate.prices.traffic.WorkOnParts` has the work).

    Args:
        labels: of the stage; their sizes are no matter.
        parts: per cut axis, the units that the device has, and those of its whole split group.
    """
    local, graph = _Local(labels, parts), labels.graph
    read = {name for op in labels.ops for name in graph.by_name[op].inputs if graph.by_name[name].kind in ("parameter", "buffer")}
    made = {op.name: local.op(op) for op in map(graph.by_name.__getitem__, (*labels.ops, *read))}
    held = ((known, name) for name in read if (known := graph.parameter_by_name.get(graph.by_name[name].target)))
    return graph.resized(made, {known.name: local.parameter(known, name) for known, name in held})


class _Local:
    """Turns what is whole into the part of one device; every dimension is looked at once."""

    def __init__(self, labels: Labels, parts: Mapping[str, tuple[int, int]]) -> None:
        self._labels = labels
        self._axes: Axes = labels.axes
        self._sizes = {axis: self._units(axis, *part) for axis, part in parts.items()}
        self._shares: dict[tuple[Dimension, str], tuple[int, int] | None] = {}

    def _units(self, axis: str, size: int, total: int) -> int:
        """Units of an axis; of the batch, shares of the example's rows."""
        return size if axis != BATCH else max(1, round(self._axes.by_name[axis].size * size / total))

    def op(self, op: Op) -> Op:
        known = self._axes.ops.get(op.name)
        if known is None:
            return op
        held = self._labels.held(op.name)
        if held is None:
            return op
        outputs = tuple(self._spec(spec, dims, held) for spec, dims in zip(op.outputs, known.outputs, strict=True))
        return replace(op, outputs=outputs)

    def parameter(self, parameter: Parameter, op: str) -> Parameter:
        held = self._labels.held(op)
        spec = self._spec(parameter.spec, self._axes.parameters[parameter.name], held) if held else parameter.spec
        return parameter if spec is parameter.spec else replace(parameter, spec=spec)

    def _spec(self, spec: TensorSpec, dimensions: Sequence[Dimension], axis: str) -> TensorSpec:
        shares = [self._share(dimension, axis) for dimension in dimensions]
        if not any(shares):
            return spec
        return replace(spec, shape=tuple(size * s[0] // s[1] if s else size for size, s in zip(spec.shape, shares, strict=True)))

    def _share(self, dimension: Dimension, axis: str) -> tuple[int, int] | None:
        """What of a dimension is held: so many of so many; None for all of it."""
        key = dimension, axis
        if key not in self._shares:
            held, whole = self._extent(dimension, axis), self._extent(dimension, None)
            self._shares[key] = None if held == whole else (held, whole)
        return self._shares[key]

    def _extent(self, dimension: Dimension, axis: str | None) -> int:
        return prod(self._size(factor, axis) for factor in dimension)

    def _size(self, factor: Factor, axis: str | None) -> int:
        if isinstance(factor, Concatenation):
            return sum(self._extent(piece, axis) for piece in factor.pieces)
        return self._sizes[factor] if factor == axis else self._axes.by_name[factor].size
