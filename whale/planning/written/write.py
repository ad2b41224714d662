"""A plan as the text of a written plan, which says all of it: read back, it is the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from whale.config import ReplicaBlock, StageBlock
from whale.config.replicas import MODEL, REPLICAS
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica, Stage
from whale.ir.profile import model_fingerprint

WIDTH = 140


def write_plan(plan: Plan, graph: ModelGraph) -> str:
    """The text, in YAML, with the model's fingerprint; what several replicas or stages say alike stands once, under a name.

    Args:
        graph: the model that the plan is for.

    Raises:
        PlanError: state is shared out or kept on hosts, which the text does not say.
    """
    stages = (stage for replica in plan.replicas for stage in replica.stages)
    if any(stage.offloads for stage in stages) or not all(form.is_plain for state in plan.parameter_states for _, form in state.forms):
        raise PlanError(
            "a plan in YAML does not say what is shared out among devices or kept on hosts",
            hint="write it as JSON, which says all of it (--output FILE.json)",
        )
    replicas = [block.as_data() for block in written_replicas(plan, graph)]
    data = _shared({MODEL: model_fingerprint(graph), REPLICAS: replicas}, {})
    return str(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=WIDTH, allow_unicode=True)).rstrip()


def written_replicas(plan: Plan, graph: ModelGraph) -> tuple[ReplicaBlock, ...]:
    """What a written plan says of each replica: all that decides the step."""
    calls = [op.name for op in graph.ops if op.kind == "call"]
    position = {name: index for index, name in enumerate(calls)}
    return tuple(_block(replica, calls, position) for replica in plan.replicas)


def _block(replica: Replica, calls: Sequence[str], position: Mapping[str, int]) -> ReplicaBlock:
    pipeline = replica.pipeline
    said = ((name, getattr(pipeline, name)) for name in ("schedule", "num_micro_batch", "num_chunks", "group_size"))
    again = pipeline.recomputed_stages
    return ReplicaBlock(
        rows=replica.share,
        pipeline=tuple((name, value) for name, value in said if value is not None),
        stages=tuple(_stage(stage, calls, position, stage.index in again) for stage in replica.stages),
    )


def _stage(stage: Stage, calls: Sequence[str], position: Mapping[str, int], recomputes_whole: bool) -> StageBlock:
    return StageBlock(
        devices=stage.virtual_device.devices,
        ops=_runs(stage.ops, calls, position),
        split=stage.split,
        rows=stage.shares,
        cut=stage.shards,
        recompute=tuple((segment.first, segment.last) for segment in stage.program if segment.recompute),
        halves=stage.overlap,
        recomputes_whole=recomputes_whole,
    )


def _runs(ops: Sequence[str], calls: Sequence[str], position: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """The ops as runs of consecutive calls of the graph."""
    runs: list[list[int]] = []
    for index in (position[name] for name in ops):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return tuple((calls[first], calls[last]) for first, last in runs)


def _shared(value: Any, known: dict[str, Any]) -> Any:
    """The data with one object for all equal lists and mappings, which YAML then names and refers to."""
    if isinstance(value, dict):
        value = {name: _shared(each, known) for name, each in value.items()}
    elif isinstance(value, list):
        value = [_shared(each, known) for each in value]
    else:
        return value
    return known.setdefault(repr(value), value) if len(repr(value)) > WIDTH else value
