"""Splits among other scopes: replicated, in pipelines, colocated, insisting on axes; and what cannot be split."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.planning.graphs import Graph, cluster, scope
from whale.config import Config
from whale.errors import AnnotationError, ConfigError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.scope import Scope, ScopePath
from whale.planning import make_plan
from whale.planning.verify import verify

FOUR = cluster((1e7,) * 4)


def split(entry: int, count: int | None = 2, axis: str | None = None, name: str | None = None) -> Scope:
    return dataclasses.replace(scope(entry, count, name, kind="split"), axis=axis)


def mlp(*paths: ScopePath, width: int = 8, inner: int = 32) -> ModelGraph:
    """Residual feed-forward blocks ``x + down(relu(up(norm(x))))``, one per path, and a sum; the norm keeps `width` whole."""
    graph = Graph()
    x = graph.input("x", width)
    for index, path in enumerate(paths):
        graph.path = path
        weight = graph.parameter(f"norm{index}.weight", width)
        y = graph.call(f"norm{index}", "aten.layer_norm.default", x, (width,), weight, width=width)
        up, down = graph.parameter(f"up{index}.weight", inner, width), graph.parameter(f"down{index}.weight", width, inner)
        flops = 2 * 4 * width * inner
        y = graph.call(f"up{index}", "aten.linear.default", y, up, width=inner, flops=flops)
        y = graph.call(f"relu{index}", "aten.relu.default", y, width=inner, tags=("pointwise",))
        y = graph.call(f"down{index}", "aten.linear.default", y, down, width=width, flops=flops)
        x = graph.call(f"add{index}", "aten.add.Tensor", x, y, width=width, tags=("pointwise",))
    graph.path = ()
    graph.sum_loss(x)
    return graph.build()


def row_of_layers(path: ScopePath, count: int) -> ModelGraph:
    """Square layers in a row, without residuals."""
    graph = Graph()
    x = graph.input("x", 16)
    graph.path = path
    for index in range(count):
        x = graph.linear(f"layer{index}", x, width=16)
        x = graph.call(f"relu{index}", "aten.relu.default", x, width=16, tags=("pointwise",))
    graph.sum_loss(x)
    return graph.build()


def sizes(plan: Plan, stage: int = 0, replica: int = 0) -> dict[str, tuple[int, ...]]:
    return {shard.axis: shard.sizes for shard in plan.replicas[replica].stages[stage].shards}


def test_column_then_row() -> None:
    plan = make_plan(mlp((split(0),)), cluster((1e7, 1e7)), Config())
    assert sizes(plan) == {"up0.weight:0": (16, 16)}


def test_every_other_axis_of_equal_layers_in_a_row_is_cut() -> None:
    plan = make_plan(row_of_layers((split(0),), 6), cluster((1e6, 1e6)), Config())
    shard = [
        axis for axis in ("layer0", "layer1", "layer2", "layer3", "layer4", "layer5") if any(name.startswith(axis) for name in sizes(plan))
    ]
    assert shard in (["layer0", "layer2", "layer4"], ["layer1", "layer3", "layer5"])


@pytest.mark.parametrize("count", [1, None])
def test_an_axis_that_is_not_there_is_found_on_one_device_too(count: int | None) -> None:
    with pytest.raises(AnnotationError, match=r"(?s)axis='up0.wight:0' of the split matches no axis.*nearest: up0.weight:0"):
        make_plan(mlp((split(0, count, axis="up0.wight:0"),)), cluster((1e7,)), Config())
    assert make_plan(mlp((split(0, count, axis="up0.weight:0"),)), cluster((1e7,)), Config()).replicas[0].stages[0].split == 1


def test_replicate_around_split_makes_groups_that_share_rows_by_speed() -> None:
    path = (scope(0, 2), split(1, 2))
    plan = make_plan(mlp(path), cluster((3e7, 3e7), (1e7, 1e7)), Config(), rows=16)
    stage = plan.replicas[0].stages[0]
    assert (stage.split, len(stage.shares)) == (2, 2)
    assert sum(stage.shares) == 16 and stage.shares[0] > stage.shares[1]
    assert stage.rows(16) == (stage.shares[0],) * 2 + (stage.shares[1],) * 2
    assert stage.shards[0].sizes == (16, 16)


def test_split_stages_in_a_pipeline_with_unlike_counts() -> None:
    graph = mlp((scope(0, 1, "front"),), (split(1, 3, name="back"),))
    plan = make_plan(graph, FOUR, Config({"pipeline.num_micro_batch": 2}))
    verify(plan, graph, FOUR)
    front, back = plan.replicas[0].stages
    assert (front.split, front.shards, back.split) == (1, (), 3)
    assert sizes(plan, 1) == {"up1.weight:0": (11, 11, 10)}
    assert plan.pipelines[0].stage_rank == (0, 1)


def test_split_groups_stay_inside_hosts() -> None:
    path = (scope(0, 2), split(1, 2))
    plan = make_plan(mlp(path, (scope(2, 2),)), cluster((1e7,) * 3, (1e7,) * 3), Config(), rows=512)
    groups = plan.replicas[0].stages[0].virtual_device.devices
    assert {(groups[index][:2], groups[index + 1][:2]) for index in (0, 2)} == {("h0", "h0"), ("h1", "h1")}


def test_unlike_replicas_have_sizes_of_their_own() -> None:
    plan = make_plan(mlp((split(0, 2),)), cluster((1e7, 1e7), (3e7, 1e7)), Config(), rows=16)
    assert [sizes(plan, replica=index)["up0.weight:0"] for index in range(2)] == [(16, 16), (24, 8)]


def test_a_split_under_a_default_strategy_is_colocated_and_interrupts_it() -> None:
    default = scope(0, None, "rest", is_default=True)
    graph = mlp((default,), (default, split(1, None, name="wide")), (default,))
    plan = make_plan(graph, cluster((1e7, 1e7)), Config())
    stages = plan.replicas[0].stages
    assert plan.pipelines[0].stage_rank == (0, 0, 0)
    assert [stage.task_graphs for stage in stages] == [("rest",), ("wide",), ("rest.1",)]
    assert [(stage.split, len(stage.shares)) for stage in stages] == [(1, 2), (2, 1), (1, 2)]
    assert len({stage.virtual_device for stage in stages}) == 1
    assert [task_graph.strategy for task_graph in plan.task_graphs] == ["replicate", "split", "replicate"]


@pytest.mark.parametrize("asked", [1, 2])
def test_a_default_strategy_is_copied_onto_the_devices_of_a_wider_split(asked: int) -> None:
    default = scope(0, asked, "rest", is_default=True)
    graph = mlp((default,), (default, split(1, 4, name="wide")), (default,))
    plan = make_plan(graph, FOUR, Config())
    assert [stage.task_graphs for stage in plan.replicas[0].stages] == [("rest",), ("wide",), ("rest.1",)]
    assert [(stage.split, len(stage.shares)) for stage in plan.replicas[0].stages] == [(1, 4), (4, 1), (1, 4)]


def test_a_split_divides_the_devices_of_its_default_strategy() -> None:
    default = scope(0, 3, "rest", is_default=True)
    graph = mlp((default,), (default, split(1, 2, name="wide")), (default,))
    with pytest.raises(
        AnnotationError, match=r"(?s)cannot divide the 3 devices .* into groups of 2.*hint: .*2 devices for the scope that it runs in"
    ):
        make_plan(graph, FOUR, Config())


def test_those_that_ask_for_all_devices_are_colocated() -> None:
    plan = make_plan(mlp((scope(0, 4),), (split(1, 4),)), FOUR, Config())
    assert plan.pipelines[0].stage_rank == (0, 0)
    assert [(stage.split, len(stage.shares)) for stage in plan.replicas[0].stages] == [(1, 4), (4, 1)]


def test_colocation_by_configuration_makes_groups() -> None:
    config = Config({"cluster.colocate_split_and_replicate": True})
    plan = make_plan(mlp((scope(0, 4),), (split(1, 2),)), FOUR, config)
    assert [(stage.split, len(stage.shares)) for stage in plan.replicas[0].stages] == [(1, 4), (2, 2)]
    with pytest.raises(AnnotationError, match=r"(?s)split\(3\) cannot divide the 4 devices .* into groups of 3.*model.py:2"):
        make_plan(mlp((scope(0, 4),), (split(1, 3),)), FOUR, config)


def test_colocation_goes_with_no_chunks() -> None:
    config = Config({"pipeline.schedule": "interleaved", "pipeline.num_chunks": 2, "pipeline.num_micro_batch": 2})
    with pytest.raises(ConfigError, match="one stage per chunk"):
        make_plan(mlp((scope(0, 4),), (split(1, 4),)), FOUR, config)


def test_a_parameter_that_another_stage_of_the_device_holds_stays_whole() -> None:
    graph = Graph()
    table = graph.parameter("table", 8, 16)
    x = graph.input("x", 16)
    graph.path = (scope(0, 2),)
    x = graph.call("first", "aten.linear.default", x, table, width=8, flops=1024)
    graph.path = (split(1, 2),)
    x = graph.call("second", "aten.matmul.default", x, table, width=16, flops=1024)
    graph.sum_loss(x)
    with pytest.raises(AnnotationError, match="another TaskGraph on the same devices reads table"):
        make_plan(graph.build(), cluster((1e7, 1e7)), Config())


def test_one_device_cuts_nothing() -> None:
    plan = make_plan(mlp((split(0, 1),)), cluster((1e7,)), Config())
    assert (plan.replicas[0].stages[0].split, plan.replicas[0].stages[0].shards) == (1, ())


def test_an_axis_that_the_user_insists_on() -> None:
    graph = row_of_layers((split(0, 2, axis="layer1.weight:0"),), 3)
    assert sizes(make_plan(graph, cluster((1e7, 1e7)), Config()))["layer1.weight:0"] == (8, 8)


def test_an_axis_by_another_parameter_that_has_it() -> None:
    plan = make_plan(mlp((split(0, 2, axis="down0.weight:1"),)), cluster((1e7, 1e7)), Config())
    assert [shard.axis for shard in plan.replicas[0].stages[0].shards] == ["up0.weight:0"]


def test_an_axis_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(AnnotationError, match=r"(?s)axis='up0.wight:0' of the split matches no axis.*model.py:1.*nearest: up0.weight:0"):
        make_plan(mlp((split(0, 2, axis="up0.wight:0"),)), FOUR, Config())


def test_an_axis_that_the_user_insists_on_is_cut_beside_what_needs_it_whole() -> None:
    plan = make_plan(mlp((split(0, 2, axis="norm0.weight:0"),)), cluster((1e7, 1e7)), Config())
    (shard,) = plan.replicas[0].stages[0].shards
    assert (shard.axis, shard.whole_in) == ("norm0.weight:0", ("norm0",))


def test_an_op_without_a_rule_says_how_to_register_one() -> None:
    graph = Graph()
    graph.path = (split(0, 2, axis="up.weight:0"),)
    x = graph.linear("up", graph.input("x"))
    graph.sum_loss(graph.call("odd", "mine.strange.default", x))
    with pytest.raises(
        AnnotationError, match=r"(?s)mine.strange.default has no rule \(%odd\) at model.py:\d+.*whale.register_rule\('mine.strange'"
    ):
        make_plan(graph.build(), FOUR, Config())


def test_an_axis_too_short_for_the_devices() -> None:
    graph = mlp((split(0, 4, axis="up0.weight:0"),), inner=3)
    with pytest.raises(AnnotationError, match=r"(?s)up0.weight:0 has size 3, less than the 4 devices of the split.*model.py:1"):
        make_plan(graph, FOUR, Config())


def test_a_split_of_which_nothing_can_be_cut_gives_all_reasons() -> None:
    graph = mlp((split(0, 4),), inner=3, width=2)
    with pytest.raises(
        AnnotationError,
        match=r"(?s)needs an axis that can be cut \(.*norm0.weight:0 has size 2, less than the 4 devices.*up0.weight:0 has size 3",
    ):
        make_plan(graph, FOUR, Config())


def test_the_batch_is_cut_by_replicate() -> None:
    with pytest.raises(AnnotationError, match="a split cannot cut the batch"):
        make_plan(mlp((split(0, 2, axis="batch"),)), FOUR, Config())


def test_an_op_that_reads_nothing_makes_no_stage_of_its_own_before_its_colocated_split() -> None:
    graph = Graph()
    x = graph.input("x", 8)
    graph.path = (scope(0, 2),)
    x = graph.call("front", "aten.linear.default", x, graph.parameter("front.weight", 8, 8), width=8, flops=512)
    graph.path = (split(1),)
    graph.call("count", "aten.add_.Tensor", graph.parameter("count.seen", 1, kind="buffer"), 1, width=1)
    x = graph.call("back", "aten.linear.default", x, graph.parameter("back.weight", 64, 8), width=64, flops=4096)
    graph.path = ()
    graph.sum_loss(x)
    made = make_plan(graph.build(), cluster((1e7,) * 2), Config({"cluster.colocate_split_and_replicate": True}))
    front, back = made.replicas[0].stages
    assert front.ops == ("front",)
    assert {"count", "back"} <= set(back.ops)
