"""Buckets start in the order in which their gradients are whole."""

from __future__ import annotations

from tests.unit.planning.graphs import Graph, cluster
from whale.config import Config
from whale.planning import make_plan
from whale.schedules import alike_schedules
from whale.sharding.buckets import plan_buckets
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
