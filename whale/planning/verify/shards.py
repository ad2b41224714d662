"""Checks the cuts of a plan against the axes of its model: sizes add up, ops can work so, tensors lie in one way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.axes import Axes
from whale.axes.labels import label
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Replica, Shard, Stage
from whale.ir.writes import MemoryWrites


def shard_faults(plan: Plan, graph: ModelGraph, axes: Axes) -> Iterator[PlanError]:
    """Everything that is wrong with the cuts of a plan; `axes` are the graph's."""
    if all(stage.split == 1 and not stage.shards for replica in plan.replicas for stage in replica.stages):
        return
    seen: dict[tuple[object, ...], None] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            key = stage.index, stage.split, stage.shards, stage.ops
            if key not in seen:  # equal stages of other replicas have equal faults
                seen[key] = None
                yield from _stage(stage, graph, axes, f"replica {replica.index}, stage {stage.index}")
        yield from _held_twice(replica, axes)


def uncut_faults(plan: Plan) -> Iterator[PlanError]:
    """The split stages that divide nothing; one that is carried over to another capture, where its axes are none, may."""
    for replica in plan.replicas:
        for stage in replica.stages:
            if stage.split > 1 and not stage.shards:
                name = f"replica {replica.index}, stage {stage.index}"
                yield PlanError(f"a split stage cuts an axis ({name}: groups of {stage.split} devices, no cut)")


def _stage(stage: Stage, graph: ModelGraph, axes: Axes, name: str) -> Iterator[PlanError]:
    shard = [shard.axis for shard in stage.shards]
    for axis in sorted({axis for axis in shard if shard.count(axis) > 1}):
        yield PlanError(f"a stage cuts an axis once ({name}: {axis} {shard.count(axis)} times)")
    for each in stage.shards:
        yield from _sizes(each, stage, axes, name, training=graph.mode == "train")
    yield from _names(stage, graph, axes, name)
    yield from _ops(stage, graph, axes, name)


def _sizes(shard: Shard, stage: Stage, axes: Axes, name: str, *, training: bool) -> Iterator[PlanError]:
    axis = axes.by_name.get(shard.axis)
    if axis is None:
        yield PlanError(f"a cut names an axis of the model ({name}: {shard.axis})", hint="whale axes lists them")
        return
    if shard.axis == BATCH and training and not (shard.arriving or shard.handed_on or axes.mixing):
        yield PlanError(f"the rows of the batch are divided by shares, not by a cut ({name})")
    if len(shard.sizes) != stage.split:
        yield PlanError(f"a cut has a size for each device of a group ({name}: {shard} for {stage.split} devices)")
    if any(size < 1 for size in shard.sizes):
        yield PlanError(f"every device of a group has a part of a cut axis ({name}: {shard})")
    if sum(shard.sizes) != axis.size and shard.axis != BATCH:
        yield PlanError(f"the sizes of a cut add up to the axis ({name}: {shard} is {sum(shard.sizes)} of {axis.size})")


def _ops(stage: Stage, graph: ModelGraph, axes: Axes, name: str) -> Iterator[PlanError]:
    """The labels of the ops, and whether memory that is written in place lies in one way."""
    labels = label(graph, axes, stage.ops, [shard for shard in stage.shards if shard.axis in axes.by_name])
    for fault in labels.faults():
        yield PlanError(f"{fault.message} ({name})", where=fault.where)
    writes = MemoryWrites(graph, stage.ops)
    for op in stage.ops:
        if graph.by_name[op].target == "operator.getitem":
            continue
        for operand in graph.by_name[op].inputs:
            lies, needed = labels.held(operand), labels.use(op, operand).axis
            if lies != needed and writes.need_same(operand, op):
                yield PlanError(
                    f"memory that is written in place lies in one way ({name}: %{operand} {_along(lies)}, for %{op} {_along(needed)})",
                    where=graph.by_name[op].where,
                )


def _names(stage: Stage, graph: ModelGraph, axes: Axes, name: str) -> Iterator[PlanError]:
    """The ops and parameters that cuts name, and how parameters are held."""
    ops, parameters = set(stage.ops), set(graph.parameter_by_name)
    read = {source for op in stage.ops for source in graph.by_name[op].inputs} - ops
    for shard in stage.shards:
        for field, listed, known in (
            ("whole_in", shard.whole_in, ops),
            ("whole_parameters", shard.whole_parameters, parameters),
            ("scattered", shard.scattered, ops),
            ("arriving", shard.arriving, read),
            ("handed_on", shard.handed_on, ops),
        ):
            unknown = sorted(set(listed) - known)
            if unknown:
                yield PlanError(f"a cut names what its stage has ({name}: {shard.axis}, {field}: {', '.join(unknown)})")
    for parameter, shards in _held(stage, axes).items():
        if len(shards) > 1:
            along = " and ".join(shard.axis for shard in shards)
            yield PlanError(f"a parameter is held in parts of one axis ({name}: {parameter} along {along})")


def _held(stage: Stage, axes: Axes) -> dict[str, tuple[Shard, ...]]:
    """Per parameter that is held in parts, the cuts along which."""
    held: dict[str, tuple[Shard, ...]] = {}
    own = set(stage.parameters)
    for shard in stage.shards:
        for holder in dict.fromkeys(holder.rpartition(":")[0] for holder in axes.held_by.get(shard.axis, ())):
            if holder in own and holder not in shard.whole_parameters:
                held[holder] = (*held.get(holder, ()), shard)
    return held


def _along(axis: str | None) -> str:
    return f"cut along {axis}" if axis else "whole"


def _held_twice(replica: Replica, axes: Axes) -> Iterator[PlanError]:
    """Two stages on one virtual device hold a parameter in the same way."""
    if len(set(replica.pipeline.stage_rank)) == replica.pipeline.num_stages:
        return  # every stage has devices of its own
    first: dict[tuple[int, str], tuple[int, Sequence[Shard]]] = {}
    for stage in replica.stages[: replica.pipeline.num_stages]:
        held = _held(stage, axes)
        for parameter in stage.parameters:
            own = held.get(parameter, ())
            other, shards = first.setdefault((replica.pipeline.stage_rank[stage.index], parameter), (stage.index, own))
            if _ways(shards) != _ways(own):
                yield PlanError(
                    f"a device holds a parameter in one way (replica {replica.index}: {parameter} in stage {other} "
                    f"{_show(shards)}, in stage {stage.index} {_show(own)})"
                )


def _ways(shards: Sequence[Shard]) -> list[tuple[str, tuple[int, ...]]]:
    return [(shard.axis, shard.sizes) for shard in shards]


def _show(shards: Sequence[Shard]) -> str:
    return "cut along " + ", ".join(map(str, shards)) if shards else "whole"
