"""Buckets start in the order in which their gradients are whole; what is gathered is gathered where it is read."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.planning.graphs import Graph, chain, cluster
from whale.config import Config
from whale.ir.graph import ModelGraph, TensorSpec
from whale.ir.plan import Plan, program_of
from whale.planning import make_plan
from whale.schedules import alike_schedules, schedules_of
from whale.sharding.buckets import plan_buckets, visits_of
from whale.sharding.communicators import groups_of
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


def in_groups(zero: str, groups: tuple[int, ...], shares: tuple[int, ...] = ()) -> tuple[Plan, ModelGraph]:
    """Layers of one parameter on four devices, of which some keep a copy together."""
    model, config = chain(3), Config({"memory.zero": zero, "planning.search": "off"})
    plan = make_plan(model, cluster((1e9,) * 4), config, rows=8)
    return replace(plan, keeper_groups=groups, keeper_shares=shares), model


def test_groups_have_runs_of_their_own_and_sum_between_them() -> None:
    plan, model = in_groups("2", (0, 0, 1, 1), (1, 1, 1, 3))
    (bucket,) = (
        each
        for each in plan_buckets(plan, parameter_shardings(plan, model, None), model, (0,) * 4, 1).summed
        if each.names == ("layer2.weight",)
    )
    assert bucket.owners == (0, 1, 2, 3) and bucket.groups == ((0, 1), (2, 3))
    ends = {keeper: (start, stop) for keeper, start, stop in bucket.runs}
    assert set(ends) & {0, 1} and set(ends) & {2, 3}
    for group in bucket.groups:  # each covers the whole buffer
        assert sum(stop - start for keeper, (start, stop) in ends.items() if keeper in group) == bucket.num_elements
    assert [start for _, start, _ in bucket.between] == [0, *(stop for _, _, stop in bucket.between[:-1])]
    assert bucket.between[-1][2] == bucket.num_elements
    for keepers, start, stop in bucket.between:
        assert len(keepers) == 2 and all(ends[keeper][0] <= start and stop <= ends[keeper][1] for keeper in keepers)
    assert all(keepers in groups_of(plan, model, parameter_shardings(plan, model, None)) for keepers, _, _ in bucket.between)


def test_weights_stay_in_their_group() -> None:
    for zero, kind in (("2", "published"), ("3", "gathered")):
        plan, model = in_groups(zero, (0, 1, 0, 1))
        found = plan_buckets(plan, parameter_shardings(plan, model, None), model, alike_schedules(plan), bucket_bytes=1)
        buckets = getattr(found, kind)
        assert {bucket.owners for bucket in buckets} == {(0, 2), (1, 3)}
        assert not any(bucket.groups for bucket in buckets)
        assert all({place for place, _ in bucket.stages} == set(bucket.owners) for bucket in buckets)
        kept = [{name for keeper in group for name in found.kept.get(keeper, {})} for group in ((0, 2), (1, 3))]
        assert kept == [{f"layer{number}.weight" for number in range(3)}] * 2


def test_a_group_whose_replicas_run_alike_gathers_in_each_pass() -> None:
    plan, model = in_groups("3", (0, 0, 1, 1))
    slower = replace(plan.replicas[3], pipeline=replace(plan.replicas[3].pipeline, num_micro_batch=2))
    plan = replace(plan, replicas=(*plan.replicas[:3], slower))
    schedules, alike = schedules_of(plan), alike_schedules(plan)
    for groups, passes in (((), {0: False, 3: False}), ((0, 0, 1, 1), {0: True, 3: False})):
        own = replace(plan, keeper_groups=groups)
        found = plan_buckets(own, parameter_shardings(own, model, None), model, alike, bucket_bytes=1).gathered
        visits = visits_of(found, model, own, schedules)
        assert {rank: bool(visits[rank].forward) for rank in passes} == passes
