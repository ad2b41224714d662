"""The figures of every op of a graph as arrays, so that costs over thousands of ops are a few vector operations.

Among them the sizes of matrix products, because a product that is narrow in any of them does not fill the device:

                width                     of a weight      width: outputs per row             height: all rows
            +----------+                  of two values    width, height: the last two dimensions of the result
     depth  |          |                  everything else  infinite: not a product
            +----------+
+--------+  +----------+
|        |  |          |  height
+--------+  +----------+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from whale.axes.operators import is_pointwise, operator_of
from whale.estimate.costs.line import Floats, Line
from whale.ir.graph import ModelGraph, Op, TensorSpec
from whale.ir.precision import HALF, OWN_HALF


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """Sizes of one matrix product."""

    depth: float = inf  # contracted size
    width: float = inf  # of the result
    height: float = inf  # of the result, at the example's rows
    height_grows: bool = False  # whether the height is proportional to the rows
    weight: str | None = None  # the op that brings the weight; None for a product of two values


NO_PRODUCT = ProductSizes()


def product_sizes(graph: ModelGraph, op: Op) -> ProductSizes:
    """The sizes of an op whose arithmetic far exceeds what it reads and writes."""
    if not op.outputs or not op.outputs[0].shape:
        return NO_PRODUCT
    read = [graph.by_name[name] for name in op.inputs]
    made = op.outputs[0]
    # what has no rows does not count where others have, so that the example's rows decide nothing
    touched = [made, *(spec for source in read for spec in source.outputs[:1] if any(spec.row_factors) or not any(made.row_factors))]
    if op.forward_flops <= 2 * sum(spec.num_elements for spec in touched):
        return NO_PRODUCT
    depth = op.forward_flops / (2 * made.num_elements)
    weight = next((source for source in read if source.kind == "parameter" and len(source.outputs[0].shape) > 1), None)
    if weight is None:
        return _of_values(made, depth)
    width = max(1.0, weight.outputs[0].num_elements / depth)
    return ProductSizes(depth, width, made.num_elements / width, made.has_rows, weight.name)


def _of_values(made: TensorSpec, depth: float) -> ProductSizes:
    height, grows = (made.shape[-2], made.row_factors[-2] > 0) if len(made.shape) > 1 else (1, False)
    return ProductSizes(depth, float(made.shape[-1]), float(height), grows)


@dataclass(frozen=True)
class OpTable:
    """Figures per op, in graph order; each as a fixed part and a part per row of the batch."""

    position: dict[str, int]  # index of each op by name
    dtypes: tuple[str, ...]  # the distinct compute dtypes, which `dtype` indexes
    dtype: NDArray[np.int64]
    op: NDArray[np.int64]  # position in the graph
    share: Floats  # of the op's work that is done here
    launches: Floats  # kernels of the forward pass (0 for views, integers and non-calls)
    trains: Floats  # 1 where a gradient flows through the op
    flops_fixed: Floats  # of the forward pass
    flops_per_row: Floats
    backward_flops_fixed: Floats
    backward_flops_per_row: Floats
    bytes_fixed: Floats  # read and written by the forward pass
    bytes_per_row: Floats
    depth: Floats  # `ProductSizes`
    width: Floats
    height_fixed: Floats
    height_per_row: Floats

    def narrowest(self, num_rows: float) -> Floats:
        """The smallest size of each product at a number of rows."""
        found: Floats = np.minimum(np.minimum(self.depth, self.width), self.height_fixed + self.height_per_row * num_rows)
        return found


def spec_line(spec: TensorSpec, num_rows: int) -> Line:
    """Bytes of a tensor by rows, from its shape at the example's `num_rows`.

    A dimension that depends on the rows in an unknown way counts as proportional.
    """
    if any(spec.row_factors):
        return Line(0.0, spec.num_bytes / num_rows)
    return Line(float(spec.num_bytes), 0.0)


def output_line(op: Op, num_rows: int) -> Line:
    return Line.sum(spec_line(spec, num_rows) for spec in op.outputs)


def output_lines(graph: ModelGraph) -> dict[str, Line]:
    """Per op of a graph, the bytes of its outputs by rows."""
    return {op.name: output_line(op, graph.num_rows) for op in graph.ops}


def is_free(op: Op) -> bool:
    """Whether the op computes nothing on the device: views, items of tuples, integers, non-calls."""
    return op.kind != "call" or not op.outputs or "view" in op.tags or op.target == "operator.getitem"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a graph."""

    of: Mapping[str, int]  # per op that is not free, the number of its kernel
    writes: frozenset[str]  # the ops whose results leave their kernel
    reads: Mapping[str, tuple[str, ...]]  # per op, what it is the first of its kernel to read, from outside of it
    starts: frozenset[str]  # the first op of each kernel


def _one_by_one(graph: ModelGraph) -> Kernels:
    """A kernel for each op."""
    computing = [op for op in graph.ops if not is_free(op)]
    names = frozenset(op.name for op in computing)
    return Kernels({name: number for number, name in enumerate(names)}, names, {op.name: op.inputs for op in computing}, names)


def _by_hand(graph: ModelGraph) -> Kernels:
    """Pointwise ops in the kernel of their only reader, if that returns a tensor of their size and is no matrix product."""
    alone, inside = _one_by_one(graph), set[str]()
    for op in graph.ops:
        users = graph.users[op.name]
        if is_pointwise(op) and not is_free(op) and len(users) == 1:
            user = graph.by_name[users[0]]
            alike = bool(user.outputs) and _form(user.outputs[0]) == _form(op.outputs[0]) and not is_free(user)
            if alike and product_sizes(graph, user) == NO_PRODUCT:
                inside.add(op.name)
    reads = {name: tuple(each for each in read if each not in inside) for name, read in alone.reads.items()}
    return Kernels(alone.of, alone.writes - inside, reads, alone.starts - inside)


def _form(spec: TensorSpec) -> tuple[tuple[int, ...], ...]:
    return spec.shape, spec.row_factors


def _fused(graph: ModelGraph) -> Kernels:
    from whale.estimate.costs.fusion import fused  # needed here alone

    return fused(graph)


def op_table(graph: ModelGraph, sizes: Mapping[str, Line] | None = None, *, fused: bool = False, by_hand: bool = False) -> OpTable:
    """Collects the figures of a graph.

    Args:
        sizes: its `output_lines`, where already known.
        fused: whether a compiler puts several ops into one kernel.
        by_hand: if not, whether pointwise ops are fused with their only reader.
    """
    sizes = output_lines(graph) if sizes is None else sizes
    kernels = _fused(graph) if fused else _by_hand(graph) if by_hand else _one_by_one(graph)
    dtypes: dict[str, int] = {"float32": 0}
    rows: list[tuple[float, ...]] = []
    codes: list[int] = []
    own_half = {HALF: OWN_HALF} if graph.half_by_device else {}
    for op in graph.ops:
        dtype = _compute_dtype(op)
        codes.append(dtypes.setdefault(own_half.get(dtype, dtype), len(dtypes)))
        rows.append(_FREE if is_free(op) else _figures(op, graph, sizes, kernels))
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(_FREE)).T
    number, whole = np.arange(len(rows)), np.ones(len(rows))
    return OpTable(graph.position, tuple(dtypes), np.array(codes, dtype=np.int64), number, whole, *columns)


def _compute_dtype(op: Op) -> str:
    for spec in op.outputs:
        if "float" in spec.dtype:
            return spec.dtype
    return "float32"


_FREE = (0.0,) * 8 + (inf, inf, inf, 0.0)


def _figures(op: Op, graph: ModelGraph, sizes: Mapping[str, Line], kernels: Kernels) -> tuple[float, ...]:
    written = sizes[op.name]
    read = written if operator_of(op).looks_up else Line.sum(sizes[name] for name in kernels.reads[op.name])
    with_rows = written.per_row > 0 or any(sizes[name].per_row > 0 for name in op.inputs)
    moved = read + written if op.name in kernels.writes else read
    product = product_sizes(graph, op)
    forward, backward = _spread(op.forward_flops, with_rows, graph.num_rows), _spread(op.backward_flops, with_rows, graph.num_rows)
    trains = 1.0 if op.requires_grad else 0.0
    launches = 1.0 if op.name in kernels.starts else 0.0
    height = (0.0, product.height / graph.num_rows) if product.height_grows else (product.height, 0.0)
    work = forward.fixed, forward.per_row, backward.fixed, backward.per_row, moved.fixed, moved.per_row
    return (launches, trains, *work, product.depth, product.width, *height)


def _spread(flops: int, with_rows: bool, num_rows: int) -> Line:
    return Line(0.0, flops / num_rows) if with_rows else Line(float(flops), 0.0)
