"""The plan of a whole model on the only device is the one that the passes come to, but for figures and reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.planning.graphs import chain, cluster, scope
from tests.unit.planning.shard.test_sharding import captured
from whale.config import Config
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning.plan import plan_and_estimate
from whale.planning.whole import whole_plan

ONE = cluster((1e9,))


def bare(plan: Plan) -> Plan:
    """Without figures and reasons."""
    replicas = (replace(each, stages=tuple(replace(stage, estimates=()) for stage in each.stages)) for each in plan.replicas)
    return replace(plan, replicas=tuple(replicas), step_seconds=0.0, choices=())


@pytest.mark.parametrize(
    "family", ["chain", "gpt2", pytest.param("resnet", marks=pytest.mark.slow), pytest.param("mixtral", marks=pytest.mark.slow)]
)
def test_it_is_what_the_passes_come_to(family: str) -> None:
    graph, config = chain(3) if family == "chain" else without_scopes(captured(family)), Config({"memory.optimizer_states": 1})
    whole, (plan, step) = whole_plan(graph, ONE, config), plan_and_estimate(graph, ONE, config)
    assert whole == bare(plan)
    weights = sum(parameter.spec.num_bytes for parameter in graph.parameters)
    results = sum(spec.num_bytes for op in graph.ops for spec in op.outputs)
    assert step.devices[0].peak.total < 6 * (weights + results)  # far from what counts as plenty


def without_scopes(graph: ModelGraph) -> ModelGraph:
    return replace(graph, ops=tuple(replace(op, scope=()) for op in graph.ops))


def scoped() -> ModelGraph:
    return chain(2, [(scope(0),), (scope(1),)])


@pytest.mark.parametrize("name", ["two devices", "scopes", "memory", "num_micro_batch", "recompute", "zero", "search", "replicas"])
def test_there_is_none_where_something_is_to_be_decided(name: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "num_micro_batch": {"pipeline.num_micro_batch": 2},
        "recompute": {"recompute.policy": "auto"},
        "zero": {"memory.zero": 1},
        "search": {"planning.objective": "memory"},
        "replicas": {"replicas": [{"devices": 1}]},
    }
    devices = {"two devices": cluster((1e9, 1e9)), "memory": cluster((1e9,), memory=2**14)}
    graph = scoped() if name == "scopes" else chain(3)
    assert whole_plan(graph, devices.get(name, ONE), Config(settings.get(name, {}))) is None
