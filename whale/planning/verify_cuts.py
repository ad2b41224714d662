"""Checks the cuts of a plan against the axes of its model: whole axes stay whole, sizes add up, no op meets two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.axes import Axes, discover
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.layout import BATCH
from whale.ir.plan import Cut, Plan, Replica, Stage


def cut_faults(plan: Plan, graph: ModelGraph, axes: Axes | None = None) -> Iterator[PlanError]:
    """Everything that is wrong with the cuts of a plan; `axes` are the graph's, where they are known already."""
    if all(stage.split == 1 and not stage.cuts for replica in plan.replicas for stage in replica.stages):
        return
    axes = axes or discover(graph)
    seen: dict[tuple[object, ...], None] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            key = stage.index, stage.split, stage.cuts, stage.ops
            if key not in seen:  # equal stages of other replicas have equal faults
                seen[key] = None
                yield from _stage(stage, graph, axes, f"replica {replica.index}, stage {stage.index}")
        yield from _held_twice(plan, replica, axes)


def _stage(stage: Stage, graph: ModelGraph, axes: Axes, name: str) -> Iterator[PlanError]:
    if stage.split > 1 and not stage.cuts and graph.mode == "train":
        yield PlanError(f"a split stage cuts an axis ({name}: groups of {stage.split} devices, no cut)")
    cut = [cut.axis for cut in stage.cuts]
    for axis in sorted({axis for axis in cut if cut.count(axis) > 1}):
        yield PlanError(f"a stage cuts an axis once ({name}: {axis} {cut.count(axis)} times)")
    for each in stage.cuts:
        yield from _sizes(each, stage, axes, name)
    yield from _ops(stage, graph, axes, name, frozenset(cut))


def _sizes(cut: Cut, stage: Stage, axes: Axes, name: str) -> Iterator[PlanError]:
    axis = axes.by_name.get(cut.axis)
    if axis is None:
        yield PlanError(f"a cut names an axis of the model ({name}: {cut.axis})", hint="whale axes lists them")
        return
    if cut.axis == BATCH:
        yield PlanError(f"the rows of the batch are divided by shares, not by a cut ({name})")
    if len(cut.sizes) != stage.split:
        yield PlanError(f"a cut has a size for each device of a group ({name}: {cut} for {stage.split} devices)")
    if any(size < 1 for size in cut.sizes):
        yield PlanError(f"every device of a group has a part of a cut axis ({name}: {cut})")
    if sum(cut.sizes) != axis.size:
        yield PlanError(f"the sizes of a cut add up to the axis ({name}: {cut} is {sum(cut.sizes)} of {axis.size})")


def _ops(stage: Stage, graph: ModelGraph, axes: Axes, name: str, cut: frozenset[str]) -> Iterator[PlanError]:
    """Two cut axes in one op, and cut axes that an op needs whole: once per set of axes, with the first op."""
    clashes: dict[frozenset[str], str] = {}
    wholes: dict[str, str] = {}
    for op in stage.ops:
        roles = axes.ops[op].roles if op in axes.ops else {}
        met = cut.intersection(roles)
        if len(met) > 1:
            clashes.setdefault(met, op)
        for axis in met:
            if roles[axis].kind == "whole":
                wholes.setdefault(axis, op)
    for met, op in clashes.items():
        where = graph.by_name[op].where
        yield PlanError(f"no op has two of the axes that a stage cuts ({name}: {op} has {', '.join(sorted(met))})", where=where)
    for axis, op in wholes.items():
        where = graph.by_name[op].where
        yield PlanError(
            f"a stage cuts no axis that one of its ops needs whole ({name}: {op} {axes.ops[op].roles[axis].reason}: {axis})", where=where
        )


def _held_twice(plan: Plan, replica: Replica, axes: Axes) -> Iterator[PlanError]:
    """Two stages on one virtual device hold a parameter in the same way."""
    first: dict[tuple[int, str], tuple[int, Sequence[Cut]]] = {}
    for stage in replica.stages[: plan.num_stages]:
        held: dict[str, tuple[Cut, ...]] = {}
        for cut in stage.cuts:
            for holder in dict.fromkeys(holder.rpartition(":")[0] for holder in axes.held_by.get(cut.axis, ())):
                held[holder] = (*held.get(holder, ()), cut)
        for parameter in stage.parameters:
            own = held.get(parameter, ())
            other, cuts = first.setdefault((plan.stage_rank[stage.index], parameter), (stage.index, own))
            if cuts != own:
                yield PlanError(
                    f"a device holds a parameter in one way (replica {replica.index}: {parameter} in stage {other} "
                    f"{_show(cuts)}, in stage {stage.index} {_show(own)})"
                )


def _show(cuts: Sequence[Cut]) -> str:
    return "cut along " + ", ".join(map(str, cuts)) if cuts else "whole"
