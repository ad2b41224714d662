"""The model as one device of a split group holds it, and the work of ops on parts: arithmetic by share, traffic by what has the axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from whale.axes import Axes, Dimension, axes_of
from whale.axes.labels import Labels
from whale.axes.operators import gathered_operands, operator_of
from whale.axes.values import Concatenation, Factor
from whale.estimate.costs.compute import op_seconds
from whale.estimate.costs.costs import Costs
from whale.estimate.costs.line import Floats, Line
from whale.estimate.costs.op_table import OpTable, output_line, product_sizes
from whale.ir.cluster import Device
from whale.ir.graph import ModelGraph, Op, Parameter, TensorSpec
from whale.ir.plan import BATCH


def local_graph(labels: Labels, parts: Mapping[str, tuple[int, int]]) -> ModelGraph:
    """The graph with local shapes of the results of one stage's ops, and of the parameters that they read.

    It prices memory only: arguments and FLOPs are those of the whole (`WorkOnParts` has the work). Rows are not cut: bytes are
    priced by rows.

    Args:
        labels: of the stage; their sizes do not matter.
        parts: per cut axis, the units of this device, and of its whole split group.
    """
    local, graph = _Local(labels, parts), labels.graph
    read = {name for op in labels.ops for name in graph.by_name[op].inputs if graph.by_name[name].kind in ("parameter", "buffer")}
    made = {op.name: local.op(op) for op in map(graph.by_name.__getitem__, (*labels.ops, *read))}
    held = ((known, name) for name in read if (known := graph.parameter_by_name.get(graph.by_name[name].target)))
    return graph.resized(made, {known.name: local.parameter(known, name) for known, name in held})


class _Local:
    """Turns whole shapes into those of one device, cached by dimension."""

    def __init__(self, labels: Labels, parts: Mapping[str, tuple[int, int]]) -> None:
        self._labels = labels
        self._axes: Axes = labels.axes
        self._sizes = {axis: size for axis, (size, _) in parts.items() if axis != BATCH}
        self._shares: dict[tuple[Dimension, str], tuple[int, int] | None] = {}

    def op(self, op: Op) -> Op:
        known = self._axes.ops.get(op.name)
        if known is None:
            return op
        held = self._labels.held(op.name)
        if held not in self._sizes:
            return op
        outputs = tuple(self._spec(spec, dims, held) for spec, dims in zip(op.outputs, known.outputs, strict=True))
        return replace(op, outputs=outputs)

    def parameter(self, parameter: Parameter, op: str) -> Parameter:
        held = self._labels.held(op)
        spec = self._spec(parameter.spec, self._axes.parameters[parameter.name], held) if held in self._sizes else parameter.spec
        return parameter if spec is parameter.spec else replace(parameter, spec=spec)

    def _spec(self, spec: TensorSpec, dimensions: Sequence[Dimension], axis: str) -> TensorSpec:
        shares = [self._share(dimension, axis) for dimension in dimensions]
        if not any(shares):
            return spec
        return replace(spec, shape=tuple(size * s[0] // s[1] if s else size for size, s in zip(spec.shape, shares, strict=True)))

    def _share(self, dimension: Dimension, axis: str) -> tuple[int, int] | None:
        """The held part of a dimension, as a fraction; None for all of it."""
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


COLUMNS = tuple(each.name for each in fields(OpTable) if each.name not in ("position", "dtypes"))

DEPTH, WIDTH, HEIGHT, NEITHER = range(4)
"""Which size of a matrix product an axis is of."""


@dataclass(frozen=True)
class CutTraffic:
    """Some ops, each cut along one axis, as a table that can be scaled to a device's parts."""

    table: OpTable  # of these ops
    fixed: Floats  # per op, bytes read and written that have its axis
    per_row: Floats  # the same, per row
    sizes: NDArray[np.int64]  # per op, which size of its product the axis belongs to

    def at(self, shares: Floats) -> OpTable:
        """The table of a device with these shares, one per op."""
        table = self.table
        return replace(
            table,
            flops_fixed=table.flops_fixed * shares,
            flops_per_row=table.flops_per_row * shares,
            backward_flops_fixed=table.backward_flops_fixed * shares,
            backward_flops_per_row=table.backward_flops_per_row * shares,
            bytes_fixed=table.bytes_fixed - (1 - shares) * self.fixed,
            bytes_per_row=table.bytes_per_row - (1 - shares) * self.per_row,
            depth=table.depth * np.where(self.sizes == DEPTH, shares, 1.0),
            width=table.width * np.where(self.sizes == WIDTH, shares, 1.0),
            height_fixed=table.height_fixed * np.where(self.sizes == HEIGHT, shares, 1.0),
            height_per_row=table.height_per_row * np.where(self.sizes == HEIGHT, shares, 1.0),
            share=table.share * shares,
        )

    def seconds(self, device: Device, num_rows: float, shares: Floats, costs: Costs, *, training: bool) -> Floats:
        """Time of each op, forward and backward."""
        found = op_seconds(self.at(shares), device, num_rows, costs)
        forward: Floats = found.forward_fixed + num_rows * found.forward_per_row
        return forward + (found.backward_fixed + num_rows * found.backward_per_row) * training


def cut_traffic(graph: ModelGraph, axes: Axes, table: OpTable, work: Sequence[tuple[Op, str | None]]) -> CutTraffic:
    """The table of some ops (`work`), each with its cut axis; `table` is that of the whole graph."""
    index = np.array([table.position[op.name] for op, _ in work], dtype=np.int64)
    own = rows_of(table, index)
    lines = [
        _line(graph, axes, op, axis) if axis is not None and moved else Line()
        for (op, axis), moved in zip(work, own.bytes_fixed + own.bytes_per_row, strict=True)
    ]
    fixed = np.minimum(np.array([line.fixed for line in lines]), own.bytes_fixed)
    sizes = [
        _cut_size(graph, axes, op, axis) if axis is not None and depth < inf else NEITHER
        for (op, axis), depth in zip(work, own.depth, strict=True)
    ]
    return CutTraffic(
        own, fixed, np.minimum(np.array([line.per_row for line in lines]), own.bytes_per_row), np.array(sizes, dtype=np.int64)
    )


def _cut_size(graph: ModelGraph, axes: Axes, op: Op, axis: str) -> int:
    """Which size of an op's product an axis belongs to."""
    known, weight = axes.ops.get(op.name), product_sizes(graph, op).weight
    if known is None:
        return NEITHER
    made = [axis in axes_of(dimension) for dimension in known.outputs[0]]
    if not any(made):
        return DEPTH
    if weight is not None:
        return WIDTH if axis in axes.in_results(weight) else HEIGHT
    return WIDTH if made[-1] else HEIGHT if made[-2:-1] == [True] else NEITHER


def rows_of(table: OpTable, index: NDArray[np.int64]) -> OpTable:
    """Some rows of a table; positions stay those of the whole."""
    return replace(table, **{name: getattr(table, name)[index] for name in COLUMNS})


@dataclass(frozen=True)
class WorkOnParts:
    """The table of the whole graph, of which some ops (`index`) work on parts along `axes`, of any size."""

    table: OpTable
    index: NDArray[np.int64]
    axes: tuple[str, ...]
    traffic: CutTraffic

    def at(self, shares: Mapping[str, float]) -> OpTable:
        """The table of a device with these shares of the cut axes."""
        if not self.axes:
            return self.table
        scaled = self.traffic.at(np.array([shares[axis] for axis in self.axes]))
        columns = {}
        for name in COLUMNS:
            column = getattr(self.table, name).copy()
            column[self.index] = getattr(scaled, name)
            columns[name] = column
        return replace(self.table, **columns)


def work_on_parts(graph: ModelGraph, axes: Axes, table: OpTable, work: Mapping[str, str]) -> WorkOnParts:
    """`work`: per op, the axis along which it works on parts."""
    names = [name for name in work if name in table.position]
    index = np.array([table.position[name] for name in names], dtype=np.int64)
    along = tuple(work[name] for name in names)
    return WorkOnParts(table, index, along, cut_traffic(graph, axes, table, [(graph.by_name[name], work[name]) for name in names]))


def _line(graph: ModelGraph, axes: Axes, op: Op, axis: str) -> Line:
    """Bytes that an op reads and writes of tensors with the axis; a lookup reads as much as it returns."""
    if operator_of(op).looks_up:
        return output_line(op, graph.num_rows) * (2 if axis in axes.in_results(op.name) else 1)
    whole = gathered_operands(op, axes.ops[op.name].roles[axis]) if op.name in axes.ops and axis in axes.ops[op.name].roles else frozenset()
    having = (graph.by_name[name] for name in (op.name, *op.inputs) if axis in axes.in_results(name) and name not in whole)
    return Line.sum(output_line(each, graph.num_rows) for each in having)
