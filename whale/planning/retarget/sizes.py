"""A plan carried over to a capture of its model for batches of other sizes: the same ops on the same stages.

train, 16 tokens      %linear [b, 16, 64] on stage 0      shard of 16 positions 8:8
train, 24 tokens      %linear [b, 24, 64] on stage 0      shard of 24 positions 12:12
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from whale.axes import Axes, discover
from whale.errors import PlanError, raise_faults
from whale.estimate import Line, spec_line
from whale.ir.graph import ModelGraph
from whale.ir.plan import Edge, Plan, Replica, Stage
from whale.ir.reach import reached_parameters
from whale.planning.retarget.retarget import retarget_plan
from whale.planning.retarget.shards import as_held, same_axes
from whale.planning.shard.write import carried
from whale.planning.structure.crossing import find_batch_axes
from whale.planning.verify.shards import shard_faults


def carry_plan(plan: Plan, graph: ModelGraph, other: ModelGraph) -> Plan:
    """A training plan for a capture of the same model at other sizes.

    Where both captures run the same ops and may be cut alike, everything stays: cuts, shards, what is recomputed. Else ops go
    where their parameters are, as in evaluation.

    Args:
        plan: made for `graph`.
        graph: captured for training.
        other: captured for training at other sizes.

    Raises:
        PlanError: the model trains other parameters, has another loss, or cannot be divided as the plan says at these sizes.
    """
    _check_training(graph, other)
    recomputes = any(segment.recompute for replica in plan.replicas for stage in replica.stages for segment in stage.program)
    if _ops_of(graph) == _ops_of(other):
        try:
            return _as_it_is(plan, graph, other)
        except PlanError:
            if recomputes:
                raise
    elif recomputes:
        raise PlanError("a model that is computed again in parts runs the same ops at all sizes of its batches (here it runs others)")
    return retarget_plan(plan, graph, other)


def _as_it_is(plan: Plan, graph: ModelGraph, other: ModelGraph) -> Plan:
    axes = discover(other) if plan.is_sharded else None
    ours = discover(graph) if axes else None
    names = same_axes(ours, axes) if ours and axes else {}
    replicas = tuple(_carry_replica(plan, replica, other, ours, axes, names) for replica in plan.replicas)
    batch_axes = find_batch_axes(other, replicas)
    carried = dataclasses.replace(plan, model=other.fingerprint, replicas=replicas, batch_axes=batch_axes, choices=())
    if axes is not None:
        raise_faults(list(shard_faults(carried, other, axes)))
    return carried


def _check_training(graph: ModelGraph, other: ModelGraph) -> None:
    """Whether what ranks sum in a step, gradients and weights of the loss, is the same in both."""
    odd = sorted(reached_parameters(graph) ^ reached_parameters(other))
    if odd:
        raise PlanError(f"a model trains the same parameters at all sizes of its batches (not at all of them: {', '.join(odd)})")
    if _loss_of(graph) != _loss_of(other):
        where = other.loss[0].where if other.loss else None
        raise PlanError("a loss has the same terms at all sizes of a batch (here it has others)", where=where)


def _ops_of(graph: ModelGraph) -> list[tuple[str, str, str]]:
    return [(op.name, op.kind, op.target) for op in graph.ops]


def _loss_of(graph: ModelGraph) -> list[tuple[bool, bool, bool]]:
    """Per term, whether it has a weight, whether the batch alone decides it, and whether it is a number of rows."""
    weights = [term.weight for term in graph.loss]
    counted = [weight is not None and not graph.by_name[weight].outputs for weight in weights]
    return [(term.weight is None, term.weight_from_inputs, count) for term, count in zip(graph.loss, counted, strict=True)]


def _carry_replica(
    plan: Plan, replica: Replica, graph: ModelGraph, ours: Axes | None, axes: Axes | None, names: Mapping[str, str]
) -> Replica:
    first, last = plan.micro_batch_rows(replica.index, plan.planned_rows)[0]
    edges = []
    for edge in replica.edges:
        payload = Line.sum(spec_line(spec, graph.num_rows) for name in edge.tensors for spec in graph.by_name[name].outputs)
        edges.append(Edge(edge.source, edge.target, edge.tensors, round(payload.at(last - first))))
    stages = replica.stages
    if ours and axes:
        stages = tuple(_carry_stage(stage, ours, axes, names) for stage in stages)
    return dataclasses.replace(replica, stages=stages, edges=tuple(edges))


def _carry_stage(stage: Stage, ours: Axes, axes: Axes, names: Mapping[str, str]) -> Stage:
    shards = carried(stage.shards, names, axes)
    if len(shards) < len(stage.shards):
        lost = ", ".join(shard.axis for shard in stage.shards if not carried([shard], names, axes))
        raise PlanError(f"an axis that is cut is one at all sizes of a batch ({lost or 'two'} is none here, or too short)")
    return dataclasses.replace(stage, shards=as_held(stage, ours, shards, axes))
