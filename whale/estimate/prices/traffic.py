"""The work of ops on parts: arithmetic falls to the part, traffic by what has the axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whale.axes import Axes
from whale.estimate.costs.compute import op_seconds
from whale.estimate.costs.costs import Costs
from whale.estimate.costs.line import Line
from whale.estimate.costs.op_table import GATHERS, Floats, OpTable, spec_line
from whale.ir.cluster import Device
from whale.ir.graph import ModelGraph, Op

COLUMNS = ("dtype", "launches", "trains", "flops_fixed", "flops_per_row", "backward_flops_fixed", "backward_flops_per_row")


@dataclass(frozen=True)
class CutTraffic:
    """Some ops, each cut along one axis, as a table that can be scaled to the parts of a device.

    Attributes:
        table: of these ops.
        fixed, per_row: per op, bytes of what it reads and writes that has its axis, by rows.
    """

    table: OpTable
    fixed: Floats
    per_row: Floats

    def at(self, shares: Floats) -> OpTable:
        """The table of a device that works on these shares, one per op."""
        table = self.table
        return replace(
            table,
            flops_fixed=table.flops_fixed * shares,
            flops_per_row=table.flops_per_row * shares,
            backward_flops_fixed=table.backward_flops_fixed * shares,
            backward_flops_per_row=table.backward_flops_per_row * shares,
            bytes_fixed=table.bytes_fixed - (1 - shares) * self.fixed,
            bytes_per_row=table.bytes_per_row - (1 - shares) * self.per_row,
        )

    def seconds(self, device: Device, num_rows: float, shares: Floats, costs: Costs, *, training: bool) -> Floats:
        """Time of each op, forward and backward."""
        found = op_seconds(self.at(shares), device, num_rows, costs)
        forward: Floats = found.forward_fixed + num_rows * found.forward_per_row
        return forward + (found.backward_fixed + num_rows * found.backward_per_row) * training


def cut_traffic(graph: ModelGraph, axes: Axes, table: OpTable, work: Sequence[tuple[Op, str | None]]) -> CutTraffic:
    """The table of some ops.

    Args:
        table: of the whole graph.
        work: the ops, each with the axis that is cut.
    """
    index = np.array([table.position[op.name] for op, _ in work], dtype=np.int64)
    own = rows_of(table, index)
    lines = [
        _line(graph, axes, op, axis) if axis is not None and launches else Line()
        for (op, axis), launches in zip(work, own.launches, strict=True)
    ]
    fixed = np.minimum(np.array([line.fixed for line in lines]), own.bytes_fixed)
    return CutTraffic(own, fixed, np.minimum(np.array([line.per_row for line in lines]), own.bytes_per_row))


def rows_of(table: OpTable, index: NDArray[np.int64]) -> OpTable:
    """Some rows of a table; positions stay those of the whole."""
    return replace(table, **{name: getattr(table, name)[index] for name in (*COLUMNS, "bytes_fixed", "bytes_per_row")})


def local_table(graph: ModelGraph, axes: Axes, table: OpTable, work: Mapping[str, str], shares: Mapping[str, float]) -> OpTable:
    """The table of the whole graph as a device sees it that has these shares of the cut axes.

    Args:
        work: per op, the axis along which it works on parts.
    """
    names = [name for name in work if name in table.position]
    if not names:
        return table
    index = np.array([table.position[name] for name in names], dtype=np.int64)
    part = cut_traffic(graph, axes, table, [(graph.by_name[name], work[name]) for name in names])
    scaled = part.at(np.array([shares[work[name]] for name in names]))
    columns = {}
    for name in (*COLUMNS, "bytes_fixed", "bytes_per_row"):
        column = getattr(table, name).copy()
        column[index] = getattr(scaled, name)
        columns[name] = column
    return replace(table, **columns)


def _line(graph: ModelGraph, axes: Axes, op: Op, axis: str) -> Line:
    """Bytes of what an op reads and writes that has the axis; a lookup reads as much as it returns."""
    if op.operator in GATHERS:
        written = Line.sum(spec_line(spec, graph.num_rows) for spec in op.outputs)
        return written * (2 if axis in axes.in_results(op.name) else 1)
    names = (op.name, *op.inputs)
    specs = (spec for name in names if axis in axes.in_results(name) for spec in graph.by_name[name].outputs)
    return Line.sum(spec_line(spec, graph.num_rows) for spec in specs)
