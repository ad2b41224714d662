"""Replicas are joined where an op needs the rows of several, they are alike, and what it gathers fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.distributed.training import make_cluster
from tests.mixing import LOSSES, Layers, make_batch
from whale.api.parallelizing import resolve_config
from whale.capture import capture
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Shard
from whale.planning import make_plan, retarget_plan
from whale.planning.explain.mixing import mixed_apart, warn_of_mixing
from whale.planning.verify import verify

SPEEDS = (1.0, 3.0)


@cache
def graph_of(middle: str, loss: str = "mean", mode: Any = "train") -> ModelGraph:
    return capture(Layers(middle), make_batch(8), LOSSES[loss], mode=mode)[0]


def plan_of(graph: ModelGraph, speeds: tuple[float, ...] = SPEEDS, **settings: object) -> Plan:
    return make_plan(graph, make_cluster(speeds), resolve_config({f"pipeline.{key}": value for key, value in settings.items()}))


def test_the_rows_of_replicas_become_a_cut() -> None:
    plan = plan_of(graph_of("softmax"))
    (stage,) = plan.replicas[0].stages
    assert plan.devices == ("host0/0", "host0/1") and stage.shares == (8,) and stage.split == 2
    assert stage.shards == (Shard(BATCH, (1, 7), whole_in=("softmax",)),)
    (choice,) = (choice for choice in plan.choices if choice.pass_name == "joining")
    assert choice.decision == "divided over one group of 2 devices, batch 1:7"
    assert "%softmax aten.softmax.int reads all of it at once at tests/mixing.py:" in choice.bound
    assert mixed_apart(plan, graph_of("softmax")) == ()


def test_what_is_whole_and_what_is_pooled() -> None:
    (stage,) = plan_of(graph_of("nothing", "contrastive")).replicas[0].stages
    assert stage.shards[0].whole_in[:2] == ("matmul", "cross_entropy_loss")
    (stage,) = plan_of(graph_of("batch norm")).replicas[0].stages
    assert stage.shards[0].whole_in == ()


def test_nothing_is_joined_without_need() -> None:
    assert len(plan_of(graph_of("nothing")).replicas) == 2
    assert len(plan_of(graph_of("softmax"), speeds=(1.0,)).replicas[0].stages[0].virtual_device.devices) == 1


def test_micro_batches_stay_apart_and_are_found() -> None:
    graph = graph_of("softmax")
    plan = plan_of(graph, num_micro_batch=2)
    assert len(plan.replicas) == 2
    assert [found.op for found in mixed_apart(plan, graph)] == ["softmax"]
    assert [choice.subject for choice in plan.choices if choice.pass_name == "bridging"] == ["softmax mixes samples"]


def test_a_plan_that_does_not_fit_joined_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(step: object, cluster: object) -> None:
        asked.append(step)
        if len(asked) == 1:
            raise PlanError("out of memory")

    monkeypatch.setattr("whale.planning.plan.refuse_overfull", refuse)
    plan = plan_of(graph_of("softmax"))
    assert len(plan.replicas) == 2 and mixed_apart(plan, graph_of("softmax"))
    assert said_apart(plan) == "out of memory"


def said_apart(plan: Plan) -> str:
    """Why a plan of the model with a softmax keeps rows apart, as the warning says it."""
    graph = graph_of("softmax")
    return warn_of_mixing(mixed_apart(plan, graph), plan, graph).rpartition("they are not gathered: ")[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline.num_micro_batch": 2}, "micro-batches follow one another; with pipeline.num_micro_batch: 1 the rows are gathered"),
        ({"communication.gather_rows": False}, "communication.gather_rows is false"),
        (
            {"replicas": [{"devices": ["host0/0"]}, {"devices": ["host0/1", "host0/2"], "num_stages": 2}]},
            "the replicas are not identical",
        ),
    ],
)
def test_the_warning_says_why_rows_are_apart(settings: dict[str, object], said: str) -> None:
    plan = make_plan(graph_of("softmax"), make_cluster((1.0, 1.0, 1.0)), resolve_config(settings))
    assert said_apart(plan) == said


def test_stages_hand_on_rows() -> None:
    plan = plan_of(graph_of("nothing", "contrastive"), speeds=(1.0, 1.0, 1.0, 1.0), num_stages=2)
    first, second = plan.replicas[0].stages
    assert first.shards[0].handed_on == second.shards[0].arriving == plan.replicas[0].edges[0].tensors
    assert plan.devices == (*first.virtual_device.devices, *second.virtual_device.devices)


def test_evaluation_divides_the_rows_too() -> None:
    plan = plan_of(graph_of("batch norm"))
    other = retarget_plan(plan, graph_of("batch norm"), graph_of("batch norm", mode="predict"))
    assert [(shard.axis, shard.sizes) for shard in other.replicas[0].stages[0].shards] == [(BATCH, (1, 7))]


def test_rows_are_no_cut_where_nothing_mixes() -> None:
    graph = graph_of("nothing")
    plan = plan_of(graph)
    (stage,) = plan.replicas[0].stages
    joined = replace(stage, virtual_device=replace(stage.virtual_device, devices=plan.devices), split=2, shards=(Shard(BATCH, (2, 6)),))
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=(joined,)),))
    with pytest.raises(PlanError, match="cuts the batch; rows are divided by shares"):
        verify(plan, graph, make_cluster(SPEEDS))


def test_replicas_may_be_left_by_themselves() -> None:
    graph = graph_of("softmax")
    plan = make_plan(graph, make_cluster(SPEEDS), resolve_config({"communication.gather_rows": False}))
    assert len(plan.replicas) == 2 and [found.op for found in mixed_apart(plan, graph)] == ["softmax"]
