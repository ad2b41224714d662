"""Axes that are cut in some ops of a stage and whole in others: known patterns come out, plans are sound, bad ones are named."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.planning.graphs import ROWS, Graph, cluster
from tests.unit.planning.shard.test_sharding_scopes import mlp, split
from tests.unit.planning.transformers import gpus, transformer
from whale.axes import discover
from whale.axes.labels import Labels, label
from whale.config import Config
from whale.errors import PlanError
from whale.ir.graph import ModelGraph, TensorSpec
from whale.ir.plan import Plan, Shard
from whale.planning import make_plan, retarget_plan
from whale.planning.verify import verify
from whale.sharding.bridges import Bridge, find_bridges


def labels_of(plan: Plan, graph: ModelGraph) -> Labels:
    stage = plan.replicas[0].stages[0]
    found = label(graph, discover(graph), stage.ops, stage.shards)
    assert found.faults() == []
    return found


def bridges_of(plan: Plan, graph: ModelGraph) -> tuple[Bridge, ...]:
    return find_bridges(labels_of(plan, graph), frozenset(term.sum for term in graph.loss))


def targets(bridge: Bridge, graph: ModelGraph) -> tuple[str, bool, str | None, str | None, bool]:
    def short(axis: str | None) -> str | None:
        return axis.rpartition(".")[2] if axis else None

    operator = graph.by_name[bridge.tensor].target.split(".")[1]
    return operator, bridge.is_sum, short(bridge.source), short(bridge.target), bridge.entered


@pytest.mark.slow
def test_sequence_parallelism_comes_out_where_it_pays() -> None:
    """Norms, dropouts and additions on parts of the sequence; gather before columns, reduce-scatter after rows."""
    graph = transformer()
    plan = make_plan(graph, gpus(), Config())
    found = [targets(bridge, graph) for bridge in bridges_of(plan, graph)]
    assert found.count(("layer_norm", False, "sequence", None, True)) == 5
    assert found.count(("linear", True, None, "sequence", False)) == 4
    work = labels_of(plan, graph).work
    for op in graph.ops:
        if op.target.split(".")[1:2] in (["layer_norm"], ["dropout"]):
            assert work[op.name].endswith("sequence")
        if op.target.startswith("aten.scaled_dot_product_attention"):
            assert work[op.name].endswith("heads")
    assert found[-1] == ("cross_entropy_loss", True, None, None, False)


@pytest.mark.slow
def test_without_memory_traffic_regions_between_stay_whole() -> None:
    """Where memory is fast and messages are dear, an all-reduce each way and nothing else."""
    graph = transformer(length=128)
    plan = make_plan(graph, gpus(bandwidth=1e17, latency=1e-5), Config())
    inside = [bridge for bridge in bridges_of(plan, graph) if graph.by_name[bridge.tensor].module.startswith("blocks")]
    assert {(bridge.forward, bridge.backward) for bridge in inside} == {("all-reduce", ""), ("", "all-reduce")}


@pytest.mark.slow
def test_many_equal_layers_are_one_decision() -> None:
    """The classes of sixteen layers are those of six, so the program is the same."""
    few, many = (make_plan(transformer(layers, 1024), gpus(), Config()) for layers in (6, 16))
    blocks = [
        {shard.axis.partition(".2.")[2]: shard.sizes for shard in plan.replicas[0].stages[0].shards if ".2." in shard.axis}
        for plan in (few, many)
    ]
    assert blocks[0] == blocks[1] != {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_labels_are_found_anew_for_another_capture(mode: str) -> None:
    graph, other = transformer(), transformer(mode=mode)
    plan = make_plan(graph, gpus(), Config())
    carried = retarget_plan(plan, graph, other)
    verify(carried, other, gpus())
    stage = carried.replicas[0].stages[0]
    assert [shard.sizes for shard in stage.shards] == [shard.sizes for shard in plan.replicas[0].stages[0].shards]
    assert all(not shard.scattered for shard in stage.shards)
    work = labels_of(carried, other).work
    for op in other.ops:
        if op.target == "aten.linear.default":
            assert not work[op.name].endswith("sequence")


def test_bridges_are_told_with_what_they_move() -> None:
    graph = transformer()
    plan = make_plan(graph, gpus(), Config())
    found = [choice for choice in plan.choices if choice.pass_name == "bridges"]
    assert any("layer_norm" in each.subject and "all-gather" in each.cost and "reduce-scatter" in each.cost for each in found)
    assert f"all {len(bridges_of(plan, graph))}" in found[-1].subject
    assert "per device and micro-batch" in found[-1].cost
    assert "whole in" in str(plan)


def in_place(*, reads_later: bool) -> ModelGraph:
    """A layer whose result is changed in place, and read through a view made before."""
    graph = Graph()
    graph.path = (split(0),)
    weight = graph.parameter("up", 16, 8)
    x = graph.call("up", "aten.linear.default", graph.input("x"), weight, width=16, flops=100000)
    spec = TensorSpec((ROWS, 4, 4), "float32", (1, 0, 0))
    view = graph.call("view", "aten.view.default", x, (ROWS, 4, 4), spec=spec, tags=("view",))
    relu = graph.call("relu", "aten.relu_.default", x, width=16, tags=("in_place", "pointwise"))
    read = view if reads_later else relu
    soft = graph.call("soft", "aten.softmax.int", read, -1, spec=spec if reads_later else None, width=16)
    graph.sum_loss(soft)
    return graph.build()


@pytest.mark.parametrize("reads_later", [False, True])
def test_memory_that_is_written_in_place_lies_in_one_way(reads_later: bool) -> None:
    graph = in_place(reads_later=reads_later)
    plan = make_plan(graph, cluster((1e6, 1e6)), Config())
    found = labels_of(plan, graph)
    assert found.held("up") == found.held("relu") == found.held("view")
    written = {"up", "view"} if reads_later else {"up"}
    assert not any(bridge.tensor in written and bridge.forward and not bridge.is_sum for bridge in bridges_of(plan, graph))


def spoil(plan: Plan, **fields: object) -> Plan:
    replica = plan.replicas[0]
    first, *others = replica.stages[0].shards
    stage = dataclasses.replace(replica.stages[0], shards=(dataclasses.replace(first, **fields), *others))
    return dataclasses.replace(plan, replicas=(dataclasses.replace(replica, stages=(stage,)),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"whole_in": ("nothing",)}, "does not have what its cut of .* names .*whole_in: nothing"),
        ({"whole_parameters": ("nothing",)}, "does not have what its cut of .* names .*whole_parameters: nothing"),
        ({"scattered": ("up0",)}, "only a sum over another axis can"),
        ({"arriving": ("up0",)}, "does not have what its cut of .* names .*arriving: up0"),
    ],
)
def test_faults_of_labels_are_named(fields: dict[str, tuple[str, ...]], message: str) -> None:
    graph = mlp((split(0),))
    plan = make_plan(graph, cluster((1e7, 1e7)), Config())
    with pytest.raises(PlanError, match=f"(?s){message}"):
        verify(spoil(plan, **fields), graph, cluster((1e7, 1e7)))


def test_memory_written_in_two_ways_is_a_fault() -> None:
    graph = in_place(reads_later=False)
    plan = make_plan(graph, cluster((1e6, 1e6)), Config())
    bad = spoil(plan, whole_in=("relu", "soft", "loss"))
    with pytest.raises(PlanError, match="writes memory in place in two layouts"):
        verify(bad, graph, cluster((1e6, 1e6)))


def test_a_parameter_is_held_in_parts_of_one_axis() -> None:
    graph = mlp((split(0),))
    plan = make_plan(graph, cluster((1e7, 1e7)), Config())
    replica = plan.replicas[0]
    shards = (Shard("norm0.weight:0", (4, 4), whole_in=replica.stages[0].ops), *replica.stages[0].shards)
    stage = dataclasses.replace(replica.stages[0], shards=shards)
    with pytest.raises(PlanError, match=r"holds up0.weight in parts along several axes \(norm0.weight:0 and up0.weight:0"):
        verify(dataclasses.replace(plan, replicas=(dataclasses.replace(replica, stages=(stage,)),)), graph, cluster((1e7, 1e7)))
