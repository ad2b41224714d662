"""Checks the shape of a plan: replicas and stages are numbered, edges lead onwards, and every pipeline has a schedule."""

from __future__ import annotations

from collections.abc import Iterator

from whale.errors import PlanError, WhaleError
from whale.ir.plan import Pipeline, Plan, Replica
from whale.schedules import edge_pairs, training_schedule


def shape_faults(plan: Plan) -> list[WhaleError]:
    """Everything that is wrong with the numbers of a plan's replicas, stages, edges and rows."""
    faults: list[WhaleError] = []
    if not plan.replicas:
        faults.append(PlanError("a plan has a replica (none)"))
    if [replica.index for replica in plan.replicas] != list(range(len(plan.replicas))):
        faults.append(PlanError(f"replicas are numbered in order ({', '.join(str(replica.index) for replica in plan.replicas)})"))
    scheduled: dict[tuple[object, ...], None] = {}
    for replica in plan.replicas:
        wrong = [*_stages(replica), *_edges(replica)]
        key = replica.pipeline, edge_pairs(replica)
        if not wrong and key not in scheduled:  # equal pipelines have equal schedules
            scheduled[key] = None
            wrong += _schedule(replica)
        faults += wrong
    needed = sum(pipeline.num_micro_batch for pipeline in plan.pipelines)
    if plan.planned_rows < needed:
        faults.append(PlanError(f"every micro-batch has a row (micro-batches of all replicas: {needed}, rows: {plan.planned_rows})"))
    return faults


def _stages(replica: Replica) -> Iterator[PlanError]:
    pipeline, name = replica.pipeline, f"replica {replica.index}"
    if [stage.index for stage in replica.stages] != list(range(len(replica.stages))):
        yield PlanError(f"stages are numbered in order ({name}: {', '.join(str(stage.index) for stage in replica.stages)})")
    if len(replica.stages) != pipeline.num_stages:
        yield PlanError(f"a replica has every stage of its pipeline ({name}: {len(replica.stages)} of {pipeline.num_stages})")
    if sorted(set(pipeline.stage_rank)) != list(range(len(set(pipeline.stage_rank)))) or not pipeline.stage_rank:
        yield PlanError(f"virtual devices are numbered from 0 ({name}: {_show_ranks(pipeline)})")
    if replica.share < 1:
        yield PlanError(f"every replica has a share of the rows ({name}: {replica.share})")
    if pipeline.num_micro_batch < 1:
        yield PlanError(f"a replica has a micro-batch ({name}: {pipeline.num_micro_batch})")


def _edges(replica: Replica) -> Iterator[PlanError]:
    last = len(replica.stages) - 1
    pairs = [(edge.source, edge.target) for edge in replica.edges]
    for pair in sorted({pair for pair in pairs if pairs.count(pair) > 1}):
        yield PlanError(f"two stages have one edge (replica {replica.index}: {pair[0]} -> {pair[1]} {pairs.count(pair)} times)")
    for edge in replica.edges:
        twice = sorted({name for name in edge.tensors if edge.tensors.count(name) > 1})
        if twice:
            yield PlanError(
                f"a tensor travels an edge once (replica {replica.index}, {edge.source} -> {edge.target}: {', '.join(twice)} twice)"
            )
        if not 0 <= edge.source < edge.target <= last:
            yield PlanError(
                f"values travel to later stages (replica {replica.index}: edge {edge.source} -> {edge.target}, the last stage: {last})"
            )


def _schedule(replica: Replica) -> Iterator[PlanError]:
    try:
        training_schedule(replica.pipeline, edge_pairs(replica))
    except WhaleError as error:
        yield PlanError(f"{error.message} (replica {replica.index}: {replica.pipeline.order})", hint=error.hint)


def _show_ranks(pipeline: Pipeline) -> str:
    return " ".join(map(str, pipeline.stage_rank)) or "none"
