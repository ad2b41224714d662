"""Joins replicas whose samples depend on one another: one replica, whose stages divide its rows over split groups.

    replica 0   [a/0] ---> [a/1]    rows 0..4              replica 0   [a/0 b/0] ---> [a/1 b/1]    rows 0..7
    replica 1   [b/0] ---> [b/1]    rows 5..7      ==>                 groups of 2, cut batch 5:3

The batch is then one more cut axis: an op that needs it whole gathers it, and scatters its gradient; all other ops work on
the rows of their device, as in replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from whale.axes import Axes, Mixing
from whale.axes.labels import Labels, label
from whale.axes.values import may_lie_in_parts
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Edge, Replica, Shard, Stage, VirtualDevice
from whale.ir.writes import MemoryWrites


def needs_joining(replicas: Sequence[Replica], prices: Prices) -> bool:
    """Whether some op needs rows of several replicas, devices of a stage or micro-batches. Axes are found only if rows are divided."""
    is_divided = len(replicas) > 1 or any(len(stage.shares) > 1 for replica in replicas for stage in replica.stages)
    if not is_divided and all(replica.pipeline.num_micro_batch == 1 for replica in replicas):
        return False
    return mixes_samples(prices)


def mixes_samples(prices: Prices) -> bool:
    axes = prices.axes
    return BATCH in axes.by_name and any(_surely_mixes(found, prices.graph) for found in axes.mixing)


def why_not_joined(replicas: Sequence[Replica]) -> str:
    """Why replicas cannot be joined, and what to do; "" where they can."""
    if any(replica.pipeline.num_micro_batch > 1 for replica in replicas):
        return "micro-batches follow one another; with pipeline.num_micro_batch: 1 the rows are gathered"
    if any(stage.split > 1 for replica in replicas for stage in replica.stages):
        return "a stage is split along another axis"
    if not _are_alike(replicas):
        return "the replicas are not identical"
    return ""


def with_one_program(replicas: Sequence[Replica]) -> tuple[Replica, ...]:
    """Replicas with the same stages, all with the program of the one that recomputes most, so that they are equal.

    Recomputation follows from each device's memory; recomputing more than needed always fits.
    """
    forms = {tuple(stage.ops for stage in replica.stages) for replica in replicas}
    if len(forms) > 1:
        return tuple(replicas)
    stages = zip(*(replica.stages for replica in replicas), strict=True)
    alike = [max(own, key=lambda stage: sum(map(len, stage.recomputed))).program for own in stages]
    return tuple(
        replace(replica, stages=tuple(replace(stage, program=program) for stage, program in zip(replica.stages, alike, strict=True)))
        for replica in replicas
    )


def join_replicas(replicas: Sequence[Replica], prices: Prices) -> tuple[Replica, ...]:
    """Joins replicas that can be joined (`why_not_joined`)."""
    graph, axes = prices.graph, prices.axes
    first = replicas[0]
    joined = tuple(_joined([replica.stages[index] for replica in replicas], replicas) for index in range(len(first.stages)))
    edges = tuple(
        Edge(own[0].source, own[0].target, own[0].tensors, sum(edge.num_bytes for edge in own))
        for own in zip(*(replica.edges for replica in replicas), strict=True)
    )
    rows = sum(replica.share for replica in replicas)
    return (replace(first, share=rows, stages=cut_rows(joined, edges, graph, axes), edges=edges),)


def _surely_mixes(found: Mixing, graph: ModelGraph) -> bool:
    """Whether an op needs other rows; of a user's operator without a rule it is unknown."""
    return found.kind == "mixes" or graph.by_name[found.op].target.startswith("aten.")


def _are_alike(replicas: Sequence[Replica]) -> bool:
    forms = {
        (replica.pipeline, tuple((stage.ops, stage.program) for stage in replica.stages), tuple(edge.tensors for edge in replica.edges))
        for replica in replicas
    }
    return len(forms) == 1


def _joined(stages: Sequence[Stage], replicas: Sequence[Replica]) -> Stage:
    """One stage on all devices, as one split group; the rows of each device are its size of the batch."""
    devices = tuple(device for stage in stages for device in stage.virtual_device.devices)
    if len(devices) == 1:
        return stages[0]
    sizes = tuple(rows for stage, replica in zip(stages, replicas, strict=True) for rows in stage.rows(replica.share))
    cut = (Shard(BATCH, sizes),)
    return replace(stages[0], virtual_device=VirtualDevice(devices), shares=(sum(sizes),), split=len(devices), shards=cut)


def cut_rows(stages: Sequence[Stage], edges: Iterable[Edge], graph: ModelGraph, axes: Axes) -> tuple[Stage, ...]:
    """Stages whose only cut is the batch, with what is whole in them and what crosses their borders in parts."""
    found = []
    travelling = list(edges)
    for stage in stages:
        shard = stage.row_shard
        if shard is None or len(stage.shards) > 1:
            found.append(stage)
            continue
        arriving = [name for edge in travelling if edge.target == stage.index for name in edge.tensors]
        leaving = [name for edge in travelling if edge.source == stage.index for name in edge.tensors]
        plain = Shard(BATCH, shard.sizes, (), tuple(_with_rows(stage.parameters, axes)), (), _in_parts(arriving, axes), ())
        labels = _labels(stage, plain, graph, axes)
        handed_on = tuple(name for name in _in_parts(leaving, axes) if labels.held(name) == BATCH)
        found.append(replace(stage, shards=(replace(labels.shards[0], handed_on=handed_on),)))
    return tuple(found)


def _labels(stage: Stage, shard: Shard, graph: ModelGraph, axes: Axes) -> Labels:
    """All ops that can work on their own rows do, except those that share memory which others need whole."""
    writes = MemoryWrites(graph, stage.ops)
    whole = {name for name in stage.ops if name in axes.ops and _is_whole(name, axes)}
    while True:
        meeting = tuple(name for name in stage.ops if name in axes.ops and BATCH in axes.ops[name].roles and name in whole)
        labels = label(graph, axes, stage.ops, (replace(shard, whole_in=meeting),))
        clash = {
            graph.storage[name]
            for op in stage.ops
            if graph.by_name[op].target != "operator.getitem"
            for operand in graph.by_name[op].inputs
            if labels.held(operand) != labels.use(op, operand).axis and writes.need_same(operand, op)
            for name in (op, operand)
        }
        more = {name for name in stage.ops if graph.storage[name] in clash} - whole
        if not more:
            return labels
        whole |= more


def _is_whole(name: str, axes: Axes) -> bool:
    role = axes.ops[name].roles.get(BATCH)
    return role is not None and role.kind == "whole"


def _in_parts(names: Iterable[str], axes: Axes) -> tuple[str, ...]:
    """The tensors among `names` that stages can hand on by rows."""
    made = {name: axes.ops[name].outputs for name in set(names) if name in axes.ops}
    return tuple(sorted(name for name, outputs in made.items() if len(outputs) == 1 and may_lie_in_parts(outputs[0], BATCH)))


def _with_rows(parameters: Iterable[str], axes: Axes) -> Iterable[str]:
    held = {holder.rpartition(":")[0] for holder in axes.held_by[BATCH]}
    return (name for name in parameters if name in held)
