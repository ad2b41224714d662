"""The search finds the fastest of all plans of its space."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most, slow
from tests.unit.planning.graphs import Graph, device
from tests.unit.search.exhaustive import least
from whale.config import Config
from whale.errors import BatchError, ConfigError, PlanError, WhaleError
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.graph import ModelGraph
from whale.planning import MemoryShortage, make_plan
from whale.planning.pipeline.balance import shortage
from whale.planning.plan import EstimatedPlan
from whale.planning.realizing import Realizer
from whale.planning.replicas.joining import mixes_samples
from whale.planning.shard.space import NothingToCut
from whale.planning.strategy import ReplicaSpec, Strategy
from whale.search import SearchResult, decide, search
from whale.search.failure import commonest
from whale.search.freedom import freedom_of
from whale.search.ranking import Ranked
from whale.search.searching import affordable_first

SPEEDS = (1e9, 3e9, 1e10)
GIB = 2**30
MEMORIES = (6_000, 20_000, GIB)
NETWORKS = (1e6, 1e8, 1e10)


def layers(widths: list[int]) -> ModelGraph:
    """Linear layers of these widths and a sum."""
    graph = Graph()
    value, before = graph.input("x", widths[0]), widths[0]
    for index, width in enumerate(widths):
        weight = graph.parameter(f"layer{index}.weight", width, before)
        value = graph.call(f"layer{index}", "aten.linear.default", value, weight, width=width, flops=8 * width * before)
        before = width
    graph.sum_loss(value)
    return graph.build()


def made(hosts: list[list[tuple[float, int]]], network: float) -> Cluster:
    """Hosts of devices with these speeds and memories."""
    found = []
    for number, own in enumerate(hosts):
        devices = tuple(device(f"h{number}/{index}", f"h{number}", flops, memory) for index, (flops, memory) in enumerate(own))
        found.append(Host(f"h{number}", devices, Link(1e9, 1e-6)))
    return Cluster("random", tuple(found), Link(network, 1e-5) if len(found) > 1 else None)


def looked_at_all(graph: ModelGraph, cluster: Cluster, rows: int) -> SearchResult | None:
    try:
        return search(graph, cluster, Config(), rows=rows, effort=math.inf)
    except WhaleError:
        return None


models = st.lists(st.sampled_from((4, 16, 64)), min_size=1, max_size=5).map(layers)
devices = st.tuples(st.sampled_from(SPEEDS), st.sampled_from(MEMORIES))


def clusters(num_devices: int) -> st.SearchStrategy[Cluster]:
    hosts = st.lists(st.lists(devices, min_size=1, max_size=num_devices), min_size=1, max_size=num_devices)
    return st.builds(made, hosts.filter(lambda found: sum(map(len, found)) <= num_devices), st.sampled_from(NETWORKS))


def is_exhaustive(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    found = looked_at_all(graph, cluster, rows)
    assert not mixes_samples(Prices(graph, cluster, Costs.for_model(Config(), graph, cluster)))  # else less is free
    best = least(graph, cluster, freedom_of(Config(), mixes_samples=False).config, rows, lambda draft: draft.plan.step_seconds)
    if best is not None:  # split groups over several hosts or types are not among them, and may be faster
        assert found is not None and found.plan.step_seconds <= best * (1 + 1e-9)


@at_most(8)
@given(graph=models, cluster=clusters(2), rows=st.integers(1, 9))
def test_equals_the_best_of_all_plans_on_two_devices(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    is_exhaustive(graph, cluster, rows)


@pytest.mark.slow
@at_most(40)
@given(graph=models, cluster=clusters(3), rows=st.integers(1, 9))
def test_equals_the_best_of_all_plans_on_three_devices(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    is_exhaustive(graph, cluster, rows)


@pytest.mark.slow
@at_most(3, fewest=2)  # one with four unlike devices takes most of a minute
@given(graph=models, cluster=clusters(4), rows=st.integers(1, 9))
def test_equals_the_best_of_all_plans_on_four_devices(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    is_exhaustive(graph, cluster, rows)


def test_ranks_of_a_pipeline_may_be_split_over_unlike_numbers_of_devices() -> None:
    """Two slow devices side by side are about as fast as the other: a pipeline of two equal halves."""
    graph, cluster = dear_layers(4), made([[(1e9, GIB)] * 2, [(2e9, GIB)]], network=1e7)
    found = search(graph, cluster, Config(), rows=8, effort=math.inf)
    assert str(found.strategy) == "1 x (1e+09 split over 2 -> 2e+09), zb_h2, 8 micro-batches"
    stages = found.plan.replicas[0].stages
    assert [stage.virtual_device.devices for stage in stages] == [("h0/0", "h0/1"), ("h1/0",)]


def dear_layers(depth: int, width: int = 64, work: int = 30) -> ModelGraph:
    """Linear layers that compute so many times as much as the sizes of their values say."""
    graph = Graph()
    value = graph.input("x", width)
    for index in range(depth):
        weight = graph.parameter(f"layer{index}.weight", width, width)
        value = graph.call(f"layer{index}", "aten.linear.default", value, weight, width=width, flops=8 * width * width * work)
    graph.sum_loss(value)
    return graph.build()


def search_of(graph: ModelGraph, cluster: Cluster, rows: int, **settings: object) -> SearchResult:
    return search(graph, cluster, Config({f"pipeline.{key}": value for key, value in settings.items()}), rows=rows)


def test_slow_devices_behind_a_slow_link_are_left_out() -> None:
    cluster = made([[(1e10, GIB)] * 2, [(1e9, GIB)]], network=1e6)
    found = search_of(layers([64] * 4), cluster, 16)
    assert found.plan.idle_devices == ("h1/0",)
    assert found.plan.step_seconds < make_plan(layers([64] * 4), cluster, Config(), rows=16).step_seconds


def test_a_model_larger_than_a_device_becomes_a_pipeline_or_is_split() -> None:
    graph = layers([64] * 4)  # 16 KiB a layer, 64 KiB with gradient and optimizer state
    cluster = made([[(1e9, 200_000)] * 2], network=1e9)
    with pytest.raises(MemoryShortage):
        make_plan(graph, cluster, Config(), rows=8)
    found = search_of(graph, cluster, 8)
    assert found.plan.pipelines[0].num_stages > 1 or found.plan.replicas[0].stages[0].split > 1


def test_a_pipeline_gets_micro_batches() -> None:
    found = search_of(layers([64] * 4), made([[(1e9, 200_000)]] * 2, network=1e7), 8)
    assert found.plan.pipelines[0].num_stages > 1
    assert found.plan.pipelines[0].num_micro_batch > 1


def recurrent_cells(count: int) -> ModelGraph:
    """Cells that read their weights whole: nothing of them can be split."""
    graph = Graph()
    value = graph.input("x")
    for index in range(count):
        weights = [graph.parameter(f"cell{index}.{name}", 8, 8) for name in ("weight_ih", "weight_hh")]
        value = graph.call(f"cell{index}", "aten.rnn_tanh_cell.default", value, value, *weights, flops=4 * 8 * 8 * 8)
    graph.sum_loss(value)
    return graph.build()


@pytest.mark.parametrize("effort", [2, 16, 100])
@pytest.mark.parametrize("objective", ["step_time", "memory"])
def test_splits_that_cannot_be_made_leave_room_for_plans_without(effort: float, objective: str) -> None:
    cluster, config = made([[(1e9, GIB)] * 4], network=1e9), Config({"pipeline.num_stages": 2, "planning.objective": objective})
    found = search(recurrent_cells(4), cluster, config, rows=6, effort=effort)
    assert [stage.split for replica in found.plan.replicas for stage in replica.stages] == [1, 1] * len(found.plan.replicas)


def test_what_is_set_stays() -> None:
    cluster = made([[(1e9, GIB)] * 4], network=1e9)
    found = search_of(layers([64] * 4), cluster, 8, num_stages=2, num_micro_batch=4, schedule="gpipe")
    assert {(own.num_ranks, own.num_micro_batch, own.schedule) for own in found.plan.pipelines} == {(2, 4, "gpipe")}


def test_a_number_of_stages_binds_a_search() -> None:
    graph, cluster = layers([64] * 4), made([[(1e9, GIB)] * 2, [(3e9, GIB)] * 2], network=1e8)
    settings = {"pipeline.num_stages": 4, "pipeline.num_micro_batch": 4, "recompute.policy": "none"}
    rule, step = decide(None, graph, cluster, Config(settings | {"planning.search": "off"}), rows=8)
    found, searched = decide(None, graph, cluster, Config(settings), rows=8)
    assert found.choices[0].pass_name == "search" and rule.choices[0].pass_name != "search"
    assert [own.num_ranks for own in found.pipelines] == [own.num_ranks for own in rule.pipelines] == [4]
    assert searched.step_seconds <= step.step_seconds


@pytest.mark.parametrize("num_stages", [slow(3), slow(6), 7])
def test_a_number_of_stages_is_divided_over_the_kinds(num_stages: int) -> None:
    graph, cluster = layers([64] * 8), made([[(1e9, GIB)] * 4, [(3e9, GIB)] * 4], network=1e9)
    settings = {"pipeline.num_stages": num_stages, "planning.effort": 20}
    _, step = decide(None, graph, cluster, Config(settings | {"planning.search": "off"}), rows=8)
    found, searched = decide(None, graph, cluster, Config(settings), rows=8)
    assert {own.num_ranks for own in found.pipelines} == {num_stages}
    assert searched.step_seconds <= step.step_seconds


def test_a_search_tells_what_it_has_seen() -> None:
    told = list[str]()
    found = search(layers([64] * 4), made([[(1e9, GIB), (3e9, GIB)]], network=1e9), Config(), rows=8, tell=told.append)
    assert told[0].startswith("1 plan estimated, the best so far: ")
    assert told[-1].startswith(f"{found.num_planned} plans estimated, ") and str(found.strategy) in told[-1]


def test_no_runner_up_is_faster_than_the_choice() -> None:
    found = search_of(layers([64] * 4), made([[(1e9, GIB), (3e9, GIB)], [(1e9, GIB)]], network=1e8), 8)
    times = [found.plan.step_seconds, *(each.seconds for each in found.runners_up)]
    assert times == sorted(times) and len(times) > 3


def test_a_runner_up_is_a_whole_plan() -> None:
    found = search_of(layers([64] * 4), made([[(1e9, GIB), (3e9, GIB)]], network=1e8), 8)
    plan, step = found.runner_up(2)
    assert plan.step_seconds == step.step_seconds == found.runners_up[1].seconds
    assert plan.choices[0].subject == "runner-up 2" and str(found.strategy) in plan.choices[0].bound
    with pytest.raises(ConfigError, match=r"there is no runner-up 99; the search has \d+"):
        found.runner_up(99)


def test_the_plan_says_what_was_looked_at() -> None:
    found = search_of(layers([64] * 4), made([[(1e9, GIB), (3e9, GIB)]], network=1e8), 8)
    choice = found.plan.choices[0]
    assert choice.pass_name == "search" and choice.cost == f"{found.num_planned} plans of {found.num_strategies} strategies simulated"
    assert choice.decision == str(found.strategy) and str(found.runners_up[0]) in choice.runner_up


def test_what_fits_nowhere_says_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"weights, gradients and optimizer state alone exceed .* by 168\.11 KiB"):
        search_of(layers([64] * 4), made([[(1e9, 100_000)]], network=1e9), 8)


def test_what_fits_nowhere_says_what_would_help() -> None:
    with pytest.raises(PlanError) as caught:
        search_of(layers([64] * 4), made([[(1e9, 90_000)] * 2], network=1e9), 8)
    assert caught.value.hint is not None
    assert "4 x 1e+09" in caught.value.hint and "times the memory" in caught.value.hint
    assert len(search_of(layers([64] * 4), made([[(1e9, 90_000)] * 4], network=1e9), 8).plan.devices) == 4


def hint_of(num_devices: int, settings: dict[str, object]) -> str:
    with pytest.raises(PlanError) as caught:
        search(layers([64] * 6), made([[(1e9, 85_000)] * num_devices], network=1e9), Config({"memory.zero": "0"} | settings), rows=8)
    return caught.value.hint or ""


def test_as_many_devices_as_the_hint_asks_for_hold_the_model() -> None:
    assert "about 6 x 1e+09" in hint_of(5, {})
    assert "x 1e+09" not in hint_of(5, {"pipeline.num_stages": 5}), "whatever number of devices there is"
    for num_devices in (6, 7):
        config = Config({"memory.zero": "0"})
        found = search(layers([64] * 6), made([[(1e9, 85_000)] * num_devices], network=1e9), config, rows=8, effort=20)
        assert len(found.plan.devices) >= 6


def test_a_pipeline_over_two_kinds_is_as_deep_as_the_model_allows() -> None:
    """Of five and five devices no number of replicas takes all: the ten have more ranks than the model has places to cut."""
    graph, settings = layers([64] * 6), {"recompute.policy": "none"}
    cluster = made([[(1e9, 100_000)], [(2e9, 100_000)]] * 5, network=1e9)
    assert search(graph, cluster, Config(settings), rows=8).plan.pipelines[0].num_ranks >= 6


def test_effort_is_a_limit_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Strategy]()

    def refused(self: Realizer, strategy: Strategy) -> EstimatedPlan:
        seen.append(strategy)
        raise shortage("out of memory", 1, ())

    monkeypatch.setattr(Realizer, "realize", refused)
    with pytest.raises(MemoryShortage):
        search(layers([64] * 4), made([[(1e9, GIB)] * 4], network=1e9), Config({"memory.zero": "0"}), rows=64, effort=5)
    assert len(seen) == 1 + 6 + 6, "one that is refused takes all of this effort; six more, and what is always planned"


@pytest.mark.parametrize(
    ("efforts", "values", "expected"),
    [
        ((9, 9, 2), (1.0, 1.02, 1.04), [2, 0, 1]),
        ((9, 9, 2), (1.0, 1.02, 1.06), [0, 1, 2]),
        ((1, 9), (1.0, 1.01), [0, 1]),
        ((9,), (1.0,), [0]),
    ],
)
def test_what_the_effort_suffices_for_is_planned_first_where_it_promises_nearly_as_much(
    efforts: tuple[int, ...], values: tuple[float, ...], expected: list[int]
) -> None:
    ranked = [Ranked(Strategy((ReplicaSpec(),)), value, effort) for value, effort in zip(values, efforts, strict=True)]
    assert [ranked.index(each) for each in affordable_first(ranked, 5)] == expected


def test_more_micro_batches_than_rows_leave_nothing() -> None:
    numbers = r"\(rows: 2; replicas: 1 or more, on 1 device; micro-batches: 4\)"
    with pytest.raises(ConfigError, match=f"too few rows for the micro-batches {numbers}"):
        search_of(layers([4]), made([[(1e9, GIB)]], network=1e9), 2, num_micro_batch=4)


def test_on_one_device_the_plan_as_it_is_set_says_what_is_wrong() -> None:
    with pytest.raises(BatchError, match="too few rows: the batch has 2, and 1 replica x 3 micro-batches need 3"):
        decide(None, layers([4]), made([[(1e9, GIB)]], network=1e9), Config({"pipeline.num_micro_batch": 3}), rows=2)


def test_more_stages_than_places_to_cut_leave_nothing() -> None:
    config = Config({"pipeline.num_stages": 6})
    with pytest.raises(ConfigError, match=r"for the stages of a replica \(2 at most, asked for: 6; devices: 6\)"):
        search(layers([4]), made([[(1e9, GIB)] * 6], network=1e9), config, rows=8)


def test_samples_that_depend_on_one_another_stay_together() -> None:
    graph = Graph()
    value = graph.linear("layer", graph.input("x"))
    value = graph.call("mixed", "aten.softmax.int", value, 0)
    graph.sum_loss(value)
    found = search_of(graph.build(), made([[(1e9, GIB)] * 2], network=1e9), 8)
    assert all(own.num_micro_batch == 1 for own in found.plan.pipelines)
    assert not any("mixes samples" in choice.subject for choice in found.plan.choices)


@pytest.mark.parametrize("num_devices", [36, 40, 72])
def test_any_number_of_devices(num_devices: int) -> None:
    cluster = made([[(1e9, GIB)] * 4] * (num_devices // 4), network=1e9)
    found = search(layers([16] * 4), cluster, Config(), rows=2 * num_devices, effort=8)
    assert len(found.plan.devices) <= num_devices


def test_of_faults_that_are_no_shortage_the_commonest_is_told() -> None:
    rows = [BatchError(f"a micro-batch has a row (rows: {number})") for number in (1, 2)]
    assert commonest([ConfigError("a schedule has chunks (1)"), *rows]) is rows[0]
    cut = NothingToCut("a split needs an axis (none)")
    assert commonest([cut, cut, *rows]) is rows[0] and commonest([cut]) is cut
