"""What a user has divided stays so; what that leaves open is searched for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whale.search.open
from tests.examples import at_most
from tests.unit.planning.graphs import Graph, scope
from tests.unit.search.exhaustive import least_divided
from tests.unit.search.test_search import GIB, SPEEDS, clusters, layers, made
from whale.config import Config
from whale.errors import AnnotationError, WhaleError
from whale.estimate import Costs
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import MemoryShortage, make_plan
from whale.search import SearchResult, decide, search
from whale.search.advice import advise

FRONT, BACK = scope(0, 1, "front"), scope(1, 1, "back")


def scoped(widths: Sequence[int], counts: Sequence[int | None] = (1, 1)) -> ModelGraph:
    """Linear layers of these widths in as many scopes as there are counts, and a sum."""
    graph = Graph()
    value, before = graph.input("x", widths[0]), widths[0]
    for index, width in enumerate(widths):
        number = index * len(counts) // len(widths)
        graph.path = (scope(number, counts[number], f"part{number}"),)
        weight = graph.parameter(f"layer{index}.weight", width, before)
        value = graph.call(f"layer{index}", "aten.linear.default", value, weight, width=width, flops=8 * width * before)
        before = width
    graph.sum_loss(value)
    return graph.build()


def found_for(graph: ModelGraph, cluster: Cluster, rows: int = 8, **settings: object) -> SearchResult:
    return search(graph, cluster, Config(settings), rows=rows)


def counts_of(plan: Plan) -> list[list[int]]:
    return [[len(stage.virtual_device.devices) for stage in replica.stages] for replica in plan.replicas]


@at_most(12)
@given(widths=st.lists(st.sampled_from((4, 16, 64)), min_size=2, max_size=5), cluster=clusters(3), rows=st.integers(3, 9))
def test_it_is_never_worse_than_the_rule_and_keeps_the_scopes(widths: list[int], cluster: Cluster, rows: int) -> None:
    graph = scoped(widths)
    try:
        rule = make_plan(graph, cluster, Config(), rows=rows)
    except WhaleError:
        return
    found = found_for(graph, cluster, rows)
    assert found.plan.step_seconds <= rule.step_seconds
    assert [graph.name for graph in found.plan.task_graphs] == ["part0", "part1"]
    assert {tuple(each) for each in counts_of(found.plan)} == {tuple(each) for each in counts_of(rule)}


def is_exhaustive(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    best = least_divided(graph, cluster, Config(), rows)
    try:
        found = search(graph, cluster, Config(), rows=rows, effort=math.inf)
    except WhaleError:
        assert best is None
        return
    assert best is not None and found.plan.step_seconds == pytest.approx(best, rel=1e-9)


COUNTS: tuple[tuple[int | None, ...], ...] = ((1, 1), (1, 1, 1), (1, 1, 1, 1), (1,), (None,), (2,), (1, 2))
"""Devices that the scopes of a model ask for."""

widths = st.lists(st.sampled_from((4, 16, 64)), min_size=4, max_size=5)


@at_most(6)
@given(widths=widths, counts=st.sampled_from(COUNTS), cluster=clusters(2), rows=st.integers(1, 6))
def test_equals_the_best_of_all_plans_on_two_devices(widths: list[int], counts: Sequence[int], cluster: Cluster, rows: int) -> None:
    is_exhaustive(scoped(widths, counts), cluster, rows)


@pytest.mark.slow
@at_most(20)
@given(widths=widths, counts=st.sampled_from(COUNTS), cluster=clusters(3), rows=st.integers(1, 9))
def test_equals_the_best_of_all_plans_on_three_devices(widths: list[int], counts: Sequence[int], cluster: Cluster, rows: int) -> None:
    is_exhaustive(scoped(widths, counts), cluster, rows)


def test_micro_batches_are_searched_for() -> None:
    graph, cluster = scoped([64] * 4), made([[(1e9, GIB)] * 2], network=1e9)
    found = found_for(graph, cluster, 64)
    assert found.plan.pipelines[0].num_micro_batch > 1
    assert found.plan.step_seconds < make_plan(graph, cluster, Config(), rows=64).step_seconds
    assert "divided as given, on 2 x 1e+09, " in found.plan.choices[0].decision


def test_devices_are_tried_in_every_order() -> None:
    """By memory and by speed the second device comes first in both stages' eyes; the links say otherwise."""
    graph, speeds = scoped([64, 64, 64], (1, 1, 1)), [[(3e9, GIB)], [(1e10, GIB), (1e10, 2 * GIB)]]
    cluster = made(speeds, network=1e6)
    found = found_for(graph, cluster, **{"pipeline.num_micro_batch": 1})
    hosts = [cluster.by_name[stage.virtual_device.devices[0]].host for stage in found.plan.replicas[0].stages]
    assert hosts in (["h0", "h1", "h1"], ["h1", "h1", "h0"])


def test_slow_replicas_are_left_out() -> None:
    found = found_for(scoped([64] * 4), made([[(1e10, GIB)] * 2, [(1e7, GIB)] * 2], network=1e6))
    assert found.plan.idle_devices == ("h1/0", "h1/1")
    assert "on 2 x 1e+10" in found.plan.choices[0].decision


def test_task_graphs_that_stand_apart_do_not_share_a_device() -> None:
    """The model is so small that one device would be faster."""
    found = found_for(scoped([4, 4]), made([[(1e9, GIB)] * 2], network=1e6))
    assert len(found.plan.devices) == 2


def test_a_scope_without_a_count_takes_all_devices() -> None:
    found = found_for(scoped([4, 4], (None,)), made([[(1e9, GIB)], [(1e6, GIB)]], network=1e6))
    assert len(found.plan.devices) == 2


def test_what_is_set_stays() -> None:
    graph, cluster = scoped([64] * 4), made([[(1e9, GIB)] * 2], network=1e9)
    assert found_for(graph, cluster, 64, **{"pipeline.num_micro_batch": 2}).plan.pipelines[0].num_micro_batch == 2
    found = found_for(graph, cluster, 64, **{"pipeline.schedule": "gpipe", "recompute.policy": "full"})
    assert found.plan.pipelines[0].schedule == "gpipe" and found.plan.pipelines[0].num_micro_batch > 1
    rule, _ = decide(None, graph, cluster, Config({"planning.search": "off"}), rows=64)
    assert rule.pipelines[0].num_micro_batch == 1 and rule.choices[0].pass_name != "search"


def test_it_recomputes_where_nothing_else_fits() -> None:
    graph = Graph()
    value = graph.input("x", 64)
    for index in range(4):
        graph.path = (scope(index // 2, 1, f"part{index // 2}"),)
        weight = graph.parameter(f"layer{index}.weight", 64, 64)
        value = graph.call(f"layer{index}", "aten.linear.default", value, weight, width=64, flops=8 * 64 * 64)
        for number in range(3):
            value = graph.call(f"gelu{index}_{number}", "aten.gelu.default", value, width=64)
    graph.sum_loss(value)
    cluster, settings = made([[(1e9, 560_000)] * 2], network=1e9), {"pipeline.num_micro_batch": 1}
    with pytest.raises(MemoryShortage):
        make_plan(graph.build(), cluster, Config(settings), rows=160)
    assert any(stage.recomputed for stage in search(graph.build(), cluster, Config(settings), rows=160).plan.replicas[0].stages)


def test_replicas_that_are_written_down_are_searched_around() -> None:
    cluster = made([[(1e9, GIB)] * 3], network=1e9)
    block: dict[str, object] = {"devices": ["h0/0", "h0/2"], "num_stages": 2}
    found = search(layers([64] * 4), cluster, Config({"replicas": [block]}), rows=64)
    assert found.plan.devices == ("h0/0", "h0/2") and found.plan.pipelines[0].num_micro_batch > 1
    found = search(layers([64] * 4), cluster, Config({"replicas": [block | {"num_micro_batch": 2}]}), rows=64)
    assert found.plan.pipelines[0].num_micro_batch == 2


def test_scopes_that_cannot_be_honoured_are_an_error() -> None:
    with pytest.raises(AnnotationError, match="the scopes ask for 3 devices and the cluster has 2"):
        found_for(scoped([64] * 4, (2, 1)), made([[(1e9, GIB)] * 2], network=1e9))


@pytest.mark.parametrize("counts", [(1, 1), (1,), (2,)])
def test_what_does_not_fit_says_with_how_much_more_it_would(counts: Sequence[int]) -> None:
    graph, memory = scoped([64] * 4, counts), 60_000
    with pytest.raises(MemoryShortage) as caught:
        found_for(graph, made([[(1e9, memory)] * 2], network=1e9))
    said = re.match(r"use devices with ([0-9.]+) KiB more usable memory; or, without that division, about ", caught.value.hint or "")
    assert said is not None
    enough = math.ceil(memory + 1024 * (float(said[1]) + 0.01) / Costs.of(Config()).memory_fraction)
    assert found_for(graph, made([[(1e9, enough)] * 2], network=1e9)).plan.devices


def test_scopes_and_replicas_that_make_it_impossible_are_named() -> None:
    graph, cluster = scoped([64] * 4, (1,)), made([[(1e9, 200_000)] * 2], network=1e9)
    with pytest.raises(MemoryShortage) as caught:
        decide(None, graph, cluster, Config(), rows=8)
    assert "without the scopes there is a plan" in (caught.value.hint or "")
    blocks = [{"devices": 1}, {"devices": 1}]
    with pytest.raises(MemoryShortage) as caught:
        decide(None, layers([64] * 4), cluster, Config({"replicas": blocks}), rows=8)
    assert "without the replicas that are written down there is a plan" in (caught.value.hint or "")


def test_effort_is_a_limit() -> None:
    graph, cluster = scoped([64] * 4), made([[(speed, GIB)] for speed in SPEEDS], network=1e9)
    found = found_for(graph, cluster, 64, **{"planning.effort": 2})
    assert found.num_planned <= 3


def test_samples_that_depend_on_one_another_stay_together() -> None:
    graph = Graph()
    graph.path = (FRONT,)
    value = graph.linear("layer", graph.input("x"))
    graph.path = (BACK,)
    value = graph.call("mixed", "aten.softmax.int", graph.linear("other", value), 0)
    graph.sum_loss(value)
    found = found_for(graph.build(), made([[(1e9, GIB)] * 4], network=1e9))
    assert all(own.num_micro_batch == 1 for own in found.plan.pipelines)
    assert not any("mixes samples" in choice.subject for choice in found.plan.choices)


def test_an_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted, calls = whale.search.open.plan_as_set, list[object]()  # type: ignore[attr-defined]

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return drafted(*args)

    monkeypatch.setattr(whale.search.open, "plan_as_set", interrupted)
    found = found_for(scoped([64] * 4), made([[(1e9, GIB)] * 2], network=1e9))
    assert found.was_interrupted and found.num_planned == 1
    assert found.plan.choices[0].bound == "the search was interrupted: the best of 1 plan so far"


def test_advice_without_the_devices_that_scopes_ask_for() -> None:
    advised = advise(scoped([16, 16], (2, 1)), made([[(1e9, GIB)] * 3], network=1e9), Config({"planning.effort": 2}), rows=8)
    assert any("one alone has no plan" in each.says for each in advised.advice)
