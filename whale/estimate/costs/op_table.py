"""The figures of every op of a graph as arrays, so that costs over thousands of ops are a few vector operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.line import Line
from whale.ir.graph import ModelGraph, Op, TensorSpec

Floats = NDArray[np.float64]

GATHERS = frozenset({"embedding", "index", "gather", "index_select", "take_along_dim"})
"""Ops that read of their source only as much as they return."""


@dataclass(frozen=True)
class OpTable:
    """Figures per op, in graph order; each as a fixed part and a part per row of the batch.

    Attributes:
        position: index of each op by name.
        dtypes: the distinct dtypes; `dtype` indexes them, per op the type that it computes in.
        launches: kernels started by the forward pass (0 for views, integers and what is no call).
        trains: 1 where a gradient flows through the op.
        flops_fixed, flops_per_row: forward; `backward_flops_*` likewise.
        bytes_fixed, bytes_per_row: read and written by the forward pass.
    """

    position: dict[str, int]
    dtypes: tuple[str, ...]
    dtype: NDArray[np.int64]
    launches: Floats
    trains: Floats
    flops_fixed: Floats
    flops_per_row: Floats
    backward_flops_fixed: Floats
    backward_flops_per_row: Floats
    bytes_fixed: Floats
    bytes_per_row: Floats


def spec_line(spec: TensorSpec, num_rows: int) -> Line:
    """Bytes of a tensor by rows, from its shape at the example's `num_rows`.

    A dimension that depends on the rows in an unknown way counts as proportional.
    """
    if any(spec.row_factors):
        return Line(0.0, spec.num_bytes / num_rows)
    return Line(float(spec.num_bytes), 0.0)


def output_line(op: Op, num_rows: int) -> Line:
    """Bytes of all outputs of an op by rows."""
    return Line.sum(spec_line(spec, num_rows) for spec in op.outputs)


def output_lines(graph: ModelGraph) -> dict[str, Line]:
    """Per op of a graph, the bytes of its outputs by rows."""
    return {op.name: output_line(op, graph.num_rows) for op in graph.ops}


def is_free(op: Op) -> bool:
    """Whether the op computes nothing on the device: views, items of tuples, integers, and what is no call."""
    return op.kind != "call" or not op.outputs or "view" in op.tags or op.target == "operator.getitem"


def op_table(graph: ModelGraph) -> OpTable:
    """Collects the figures of a graph."""
    sizes = output_lines(graph)
    dtypes: dict[str, int] = {"float32": 0}
    rows: list[tuple[float, ...]] = []
    codes: list[int] = []
    for op in graph.ops:
        codes.append(dtypes.setdefault(_compute_dtype(op), len(dtypes)))
        rows.append((0.0,) * 8 if is_free(op) else _figures(op, graph, sizes))
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), 8).T
    return OpTable(graph.position, tuple(dtypes), np.array(codes, dtype=np.int64), *columns)


def _compute_dtype(op: Op) -> str:
    for spec in op.outputs:
        if "float" in spec.dtype:
            return spec.dtype
    return "float32"


def _figures(op: Op, graph: ModelGraph, sizes: dict[str, Line]) -> tuple[float, ...]:
    written = sizes[op.name]
    read = written if op.operator in GATHERS else Line.sum(sizes[name] for name in op.inputs)
    moved = read + written
    with_rows = moved.per_row > 0
    forward, backward = _spread(op.forward_flops, with_rows, graph.num_rows), _spread(op.backward_flops, with_rows, graph.num_rows)
    trains = 1.0 if op.requires_grad else 0.0
    return (1.0, trains, forward.fixed, forward.per_row, backward.fixed, backward.per_row, moved.fixed, moved.per_row)


def _spread(flops: int, with_rows: bool, num_rows: int) -> Line:
    return Line(0.0, flops / num_rows) if with_rows else Line(float(flops), 0.0)
