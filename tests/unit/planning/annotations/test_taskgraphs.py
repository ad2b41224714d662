"""Scopes to TaskGraphs and stages: counts, nesting, colocation, and what cannot be honoured."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import Graph, chain, cluster, scope
from whale.config import Config
from whale.errors import AnnotationError, ConfigError
from whale.ir.graph import ModelGraph
from whale.ir.scope import Scope, ScopePath
from whale.planning import make_plan
from whale.planning.annotations.taskgraphs import read_scopes

A, B, C = scope(0, 1, "a"), scope(1, 1, "b"), scope(2, 1, "c")
FOUR = cluster((1e9,) * 4)


def stages(graph_scopes: list[tuple], num_devices: int, **config: object) -> tuple[int, ...]:  # type: ignore[type-arg]
    graph = chain(len(graph_scopes), graph_scopes)
    found = read_scopes(graph, Config({key.replace("__", "."): value for key, value in config.items()}), num_devices)
    assert found is not None
    return found.devices


def test_no_scopes_no_annotations() -> None:
    assert read_scopes(chain(2), Config(), 4) is None


def test_entries_are_stages_in_order_of_appearance() -> None:
    plan = make_plan(chain(3, [(A,), (B,), (C,)]), FOUR, Config({"pipeline.num_micro_batch": 2}))
    assert [stage.task_graphs for stage in plan.replicas[0].stages] == [("a",), ("b",), ("c",)]
    assert plan.replicas[0].stages[2].ops == ("layer2", "loss")
    assert plan.idle_devices == ("h0/3",)
    assert any("idle" in choice.subject for choice in plan.choices)


def test_entries_of_one_name_are_one_task_graph_and_unnamed_ones_are_not() -> None:
    again = scope(7, 1, "a")
    assert stages([(A,), (again,), (B,)], 4) == (1, 1)
    assert stages([(scope(0, 1),), (scope(1, 1),)], 4) == (1, 1)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(None, None, (4,)), (2, None, (2, 1)), (None, 3, (1, 3)), (4, 4, (4,)), (2, 2, (2, 2))],
)
def test_counts(first: int | None, second: int | None, expected: tuple[int, ...]) -> None:
    """Without any count all share all devices; where a sibling states one, none means 1; those that ask for all share."""
    assert stages([(scope(0, first, "a"),), (scope(1, second, "b"),)], 4) == expected


@pytest.mark.parametrize(
    ("counts", "num_devices", "expected"),
    [
        ((1, 1, 1), 2, (1, 1)),
        ((1, 1, 1), 1, (1,)),
        ((2, 2, 2), 5, (2, 2)),
        ((1, 2, 1), 2, (1, 2, 1)),
        ((2, 2), 1, (2, 2)),
    ],
)
def test_more_stages_than_devices_share_them(counts: tuple[int, ...], num_devices: int, expected: tuple[int, ...]) -> None:
    """Consecutive ones of equal counts; others ask for more than there is, which is said later."""
    assert stages([(scope(number, count, f"s{number}"),) for number, count in enumerate(counts)], num_devices) == expected


def test_stages_that_share_a_device_are_one() -> None:
    plan = make_plan(chain(3, [(A,), (B,), (C,)]), cluster((1e9,) * 2), Config({"pipeline.num_micro_batch": 2}))
    assert [stage.task_graphs for stage in plan.replicas[0].stages] == [("a", "b"), ("c",)]
    with pytest.raises(ConfigError, match="the scopes, which make a pipeline of 3 virtual devices"):
        make_plan(chain(3, [(A,), (B,), (C,)]), cluster((1e9,) * 2), Config({"pipeline.num_stages": 2}))


def test_nested_scopes_multiply() -> None:
    outer = scope(0, 2, "outer")
    assert stages([(outer, A), (outer, B)], 4) == (2, 2)
    assert stages([(outer, A), (outer, B), (scope(9, 3, "tail"),)], 8) == (2, 2, 3)
    assert stages([(scope(0, 2, "outer"), scope(1, None, "inner"))], 8) == (8,)


OUTER = scope(0, 2, "outer")


def beside(*inner: Scope, outer: Scope = OUTER) -> ModelGraph:
    """Layers directly under a scope, before, between and after scopes inside."""
    paths: list[ScopePath] = [(outer,)]
    for each in inner:
        paths += [(outer, each), (outer,)]
    return chain(len(paths), paths)


@pytest.mark.parametrize("count", [2, None])
@pytest.mark.parametrize("outer", [2, None])
def test_layers_beside_a_split_are_copied_on_its_devices(outer: int | None, count: int | None) -> None:
    """The natural spelling of a mixture of experts."""
    path = scope(0, outer, "outer")
    plan = make_plan(beside(scope(1, count, "experts", "split"), outer=path), cluster((1e7, 1e7)), Config())
    assert [(graph.name, graph.strategy, graph.ops) for graph in plan.task_graphs] == [
        ("outer", "replicate", ("layer0",)),
        ("experts", "split", ("layer1",)),
        ("outer.1", "replicate", ("layer2", "loss")),
    ]
    stages = plan.replicas[0].stages
    assert [stage.virtual_device.devices for stage in stages] == [("h0/0", "h0/1")] * 3 and [stage.split for stage in stages] == [1, 2, 1]


def test_more_devices_make_replicas_of_nested_scopes() -> None:
    plan = make_plan(beside(scope(1, None, "experts", "split")), FOUR, Config())
    assert len(plan.replicas) == 2 and all(stage.split == (2 if stage.index == 1 else 1) for stage in plan.replicas[0].stages)


def test_replicates_inside_one_with_layers_share_its_devices() -> None:
    found = read_scopes(beside(scope(1, 2, "a"), scope(2, None, "b")), Config(), 4)
    assert found is not None and found.devices == (2,) and found.names == ("outer", "a", "b")
    deep = chain(3, [(OUTER,), (OUTER, scope(1, None, "a")), (OUTER, scope(1, None, "a"), scope(2, 2, "b", "split"))])
    found = read_scopes(deep, Config(), 4)
    assert found is not None and found.names == ("outer", "a", "b") and set(found.devices) == {2} and found.widths == (1, 2)


def test_what_has_no_parameters_stands_between_scopes() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.path = (OUTER, scope(1, 2, "experts", "split"))
    y = graph.linear("layer", x)
    graph.path = (OUTER,)
    y = graph.call("residual", "aten.add.Tensor", x, y)
    graph.sum_loss(y)
    found = read_scopes(graph.build(), Config(), 4)
    assert found is not None and found.names == ("experts",) and found.devices == (4,) and found.copies.members != ()


@pytest.mark.parametrize("kind", ["split", "replicate"])
def test_two_readings_of_nested_scopes(kind: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        make_plan(beside(scope(1, 2, "inner", kind), outer=scope(0, 4, "outer")), FOUR, Config())
    said = str(caught.value)
    assert f"{kind}(2, name='inner') inside replicate(4, name='outer') (from model.py:1) is ambiguous" in said
    assert f"it runs on the same devices, if both ask for as many ({kind}(4)); or in 4 copies of 2 devices" in said


def test_colocation_by_configuration() -> None:
    assert stages([(A,), (scope(1, 3, "b"),)], 4, cluster__colocate_split_and_replicate=True) == (3,)


def test_an_op_between_two_scopes_joins_its_consumer_and_the_loss_its_producer() -> None:
    graph = chain(3, [(A,), (), (B,)])
    plan = make_plan(graph, cluster((1e9, 1e9)), Config())
    assert [task_graph.ops for task_graph in plan.task_graphs] == [("layer0",), ("layer1", "layer2", "loss")]


def test_a_task_graph_that_comes_back_is_an_error_with_both_lines() -> None:
    with pytest.raises(
        AnnotationError, match=r"(?s)layer2 in a \(stage 0\) needs layer1 of the later stage 1 \(b, at model.py:\d+.*at model.py:\d+"
    ):
        make_plan(chain(3, [(A,), (B,), (A,)]), FOUR, Config())


def test_a_split_encloses_no_other_scope() -> None:
    outer = scope(0, 2, kind="split")
    with pytest.raises(AnnotationError, match=r"(?s)at model.py:1 encloses .*; only replicate may enclose other scopes.*at model.py:2"):
        make_plan(chain(1, [(outer, scope(1, 2))]), FOUR, Config())


def test_more_devices_than_there_are() -> None:
    graph = chain(2, [(scope(0, 3, "a"),), (scope(1, 2, "b"),)])
    with pytest.raises(AnnotationError, match=r"(?s)ask for 5 devices and the cluster has 4: a: 3 .*model.py:1.*b: 2 .*model.py:2"):
        make_plan(graph, FOUR, Config())


def test_one_name_means_one_thing() -> None:
    with pytest.raises(AnnotationError, match="scopes of one name"):
        make_plan(chain(2, [(A,), (scope(5, 2, "a"),)]), FOUR, Config())
    with pytest.raises(AnnotationError, match="are in different outer scopes"):
        make_plan(chain(2, [(scope(3, 2, "o"), A), (A,)]), FOUR, Config())


def test_glue_under_a_default_strategy_follows_its_values_but_parameters_stay() -> None:
    default = scope(0, 1, is_default=True)
    graph = Graph()
    x = graph.input("x")
    graph.path = (default,)
    x = graph.linear("first", x)
    graph.path = (A,)
    x = graph.linear("second", x)
    graph.path = (default,)
    x = graph.call("glue", "aten.relu.default", x)
    graph.sum_loss(x)
    plan = make_plan(graph.build(), cluster((1e9, 1e9)), Config())
    assert plan.replicas[0].stages[1].ops == ("second", "glue", "loss")
    graph.path = (default,)
    graph.linear("third", "glue")
    with pytest.raises(AnnotationError, match="third"):
        make_plan(graph.build(), cluster((1e9, 1e9)), Config())


def test_chunks_need_a_multiple_of_stages() -> None:
    config = Config({"pipeline.schedule": "interleaved", "pipeline.num_chunks": 2, "pipeline.num_micro_batch": 2})
    plan = make_plan(chain(4, [(scope(i, 1),) for i in range(4)]), cluster((1e9, 1e9)), config)
    assert plan.pipelines[0].stage_rank == (0, 1, 0, 1) and len(plan.devices) == 2
    with pytest.raises(ConfigError, match="multiple of 2"):
        make_plan(chain(3, [(scope(i, 1),) for i in range(3)]), cluster((1e9, 1e9)), config)


def test_num_stages_against_scopes() -> None:
    with pytest.raises(ConfigError, match="pipeline of 2"):
        make_plan(chain(2, [(A,), (B,)]), FOUR, Config({"pipeline.num_stages": 3}))
