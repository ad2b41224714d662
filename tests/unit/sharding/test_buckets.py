"""Buckets start in the order in which their gradients are whole; what is gathered is gathered where it is read."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.planning.graphs import Graph, cluster
from whale.config import Config
from whale.ir.graph import TensorSpec
from whale.ir.plan import Plan, program_of
from whale.planning import make_plan
from whale.schedules import alike_schedules, schedules_of
from whale.sharding.buckets import plan_buckets, visits_of
from whale.sharding.parameters import parameter_shardings


def test_a_parameter_that_ends_share_is_whole_last() -> None:
    graph = Graph()
    shared = graph.parameter("shared.weight", 8, 8)
    value = graph.call("first", "aten.linear.default", graph.input("x"), shared, flops=64)
    for number in range(2):
        weight = graph.parameter(f"own{number}.weight", 8, 8)
        value = graph.call(f"middle{number}", "aten.linear.default", value, weight, flops=64)
    graph.sum_loss(graph.call("last", "aten.linear.default", value, shared, flops=64))
    model = graph.build()
    plan = make_plan(model, cluster((1e9, 1e9)), Config(), rows=4)
    buckets = plan_buckets(plan, parameter_shardings(plan, model, None), model, alike_schedules(plan), bucket_bytes=1).summed
    assert [bucket.names for bucket in buckets] == [("own1.weight",), ("own0.weight",), ("shared.weight",)]


def test_backward_passes_gather_what_gradients_flow_through_or_what_is_computed_again() -> None:
    graph = Graph()
    base, middle, head = (graph.parameter(name, 8, 8, trainable=name == "head") for name in ("base", "middle", "head"))
    value = graph.call("first", "aten.linear.default", graph.input("x"), base, flops=64, grad=False)
    value = graph.call("second", "aten.linear.default", value, head, flops=64)
    view = graph.call("view", "aten.t.default", middle, spec=TensorSpec((8, 8), "float32", (0, 0)), tags=("view",), grad=False)
    graph.sum_loss(graph.call("third", "aten.mm.default", value, view, flops=64))
    model = graph.build()
    plan = make_plan(model, cluster((1e9, 1e9)), Config({"memory.zero": "3", "planning.search": "off"}), rows=4)
    assert {plan.state_of(name).is_shared_out for name in ("base", "middle", "head")} == {True}

    def gathered(plan: Plan) -> tuple[list[str], list[str]]:
        found = plan_buckets(plan, parameter_shardings(plan, model, None), model, alike_schedules(plan), bucket_bytes=1).gathered
        visits = visits_of(found, model, plan, schedules_of(plan))[0]
        forward, backward = ([name for number in own[0] for name in found[number].names] for own in (visits.forward, visits.backward))
        return forward, backward

    assert gathered(plan) == (["base", "head", "middle"], ["middle", "head"])
    stages = [replace(own, program=program_of(own.ops, [("first", "third")])) for own in plan.replicas[0].stages]
    again = replace(plan, replicas=(replace(plan.replicas[0], stages=tuple(stages)), *plan.replicas[1:]))
    assert gathered(again)[1] == ["middle", "head", "base"]
