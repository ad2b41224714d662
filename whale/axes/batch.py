"""Where the batch is in each tensor: what the runtime cuts, sends and joins by."""

from __future__ import annotations

from math import prod

from whale.axes.values import Axes, Concatenation, Factor, axes_of
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import BATCH, BatchAxis


def batch_axes(graph: ModelGraph, axes: Axes) -> dict[str, BatchAxis]:
    """Per op with one result, where its batch is: ``outer x rows x inner`` in one dimension.

    Ops are left out whose result has no batch, has it twice, or has it inside a concatenation.
    """
    return {op.name: axis for op in graph.ops if (axis := batch_axis(op, axes)) is not None}


def batch_axis(op: Op, axes: Axes) -> BatchAxis | None:
    """Where the batch is in the one result of an op; None where `batch_axes` leaves it out."""
    if op.name not in axes.ops or len(op.outputs) != 1:
        return None
    dimensions = axes.ops[op.name].outputs[0]
    places = [index for index, dimension in enumerate(dimensions) for axis in axes_of(dimension) if axis == BATCH]
    if len(places) != 1 or BATCH not in dimensions[places[0]]:
        return None
    dimension = dimensions[places[0]]
    at = dimension.index(BATCH)
    return BatchAxis(places[0], _size(dimension[:at], axes), _size(dimension[at + 1 :], axes))


def _size(factors: tuple[Factor, ...], axes: Axes) -> int:
    return prod(_size_of(factor, axes) for factor in factors)


def _size_of(factor: Factor, axes: Axes) -> int:
    if isinstance(factor, Concatenation):
        return sum(_size(piece, axes) for piece in factor.pieces)
    return axes.by_name[factor].size
