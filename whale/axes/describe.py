"""The rows of `whale axes`: per TaskGraph, its axes, who has them, which may be cut and why others may not."""

from __future__ import annotations

from dataclasses import dataclass

from whale.axes.values import Axes, axes_of
from whale.ir.graph import ModelGraph


@dataclass(frozen=True, slots=True)
class AxisRow:
    """One axis in one TaskGraph.

    Attributes:
        task_graph: the innermost scope around its ops; "" for ops under none.
        axis: its name.
        size: at the example's rows.
        held_by: the dimensions of this TaskGraph's parameters that have it, as ``fc.weight:0``.
        may_be_cut: whether all of this TaskGraph's ops can work on a part of it.
        why: where not, the first reason.
    """

    task_graph: str
    axis: str
    size: int
    held_by: tuple[str, ...]
    may_be_cut: bool
    why: str


def describe(axes: Axes, graph: ModelGraph) -> tuple[AxisRow, ...]:
    """One row per TaskGraph and axis, in the order of the graph."""
    reasons: dict[tuple[str, str], str] = {}
    held: dict[tuple[str, str], dict[str, None]] = {}
    for op in graph.ops:
        if op.name not in axes.ops:
            continue
        group = op.scope[-1].key if op.scope else ""
        for axis, role in axes.ops[op.name].roles.items():
            why = f"{op.target} {role.reason}" + (f" at {op.where}" if op.where else "") if role.kind == "whole" else ""
            reasons[group, axis] = reasons.get((group, axis)) or why
        for parameter in graph.parameters_among(op.inputs):
            for index, dimension in enumerate(axes.parameters.get(parameter.name, ())):
                for axis in axes_of(dimension):
                    held.setdefault((group, axis), {})[f"{parameter.name}:{index}"] = None
    return tuple(
        AxisRow(group, axis, axes.by_name[axis].size, tuple(held.get((group, axis), ())), not why, why)
        for (group, axis), why in reasons.items()
    )
