"""The closed forms by which strategies are ranked come near the simulation, over links that the devices have."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.examples import at_most, slow
from tests.unit.search.exhaustive import seater_of, space_of
from tests.unit.search.many import drawn_graph
from tests.unit.search.test_objective import priced
from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.errors import WhaleError
from whale.estimate import all_reduce_seconds
from whale.estimate.prices.budget import Budget
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster, Link
from whale.ir.graph import ModelGraph
from whale.planning import make_plan
from whale.planning.cutting.partition import Partition, _least, wishes_of
from whale.planning.cutting.stage_tables import StageTables
from whale.planning.pipeline.recompute import KEEP_ALL
from whale.planning.pipeline.scheduling import shape_pipeline
from whale.planning.strategy import RankSpec, ReplicaSpec, Strategy
from whale.planning.structure.stages import assign
from whale.search.form import ClosedForms
from whale.search.freedom import ORDERS
from whale.search.places import Places
from whale.workloads import GPT


@pytest.mark.parametrize(("model", "num_rows", "width"), [("V100-32GB", 32, 4), ("V100-32GB", 32, 8), ("T4", 16, 8)])
def test_a_split_group_takes_what_its_plan_takes(model: str, num_rows: int, width: int) -> None:
    """It gathers weights, which the op that reads them pays."""
    graph = GPT(layers=3, hidden=1024, heads=16, sequence=512, vocabulary=30_000).graph()
    cluster = parse_cluster(f"hosts: [{{name: a, devices: {width} x {model}}}]\nnetwork: ethernet-25g")
    forms = ClosedForms(seater_of(graph, cluster, Config(), num_rows))
    replica = ReplicaSpec((RankSpec(cluster.devices[0].kind, width),), schedule="1f1b", num_chunks=1, num_micro_batch=1)
    strategy = Strategy((replica,), near=True)
    planned = forms.planner.realize(forms.places.named(strategy)).plan.step_seconds
    assert forms.of(strategy).seconds == pytest.approx(planned, rel=0.01)


def test_a_split_group_may_begin_with_any_device() -> None:
    """The cheapest is taken first."""
    cluster = priced(made([[(1e9, GIB)] * 3], network=1e9), (3.0, 2.0, 3.0), (None,))
    forms = ClosedForms(seater_of(layers([64] * 3), cluster, Config(), 8))
    replica = ReplicaSpec((RankSpec(cluster.devices[0].kind, 3),), schedule="1f1b", num_chunks=1, num_micro_batch=1)
    strategy = Strategy((replica,), near=True)
    assert forms.of(strategy) == forms.of(forms.places.named(strategy))


@pytest.mark.parametrize(("offload", "error"), [("activations", 0.08), ("optimizer", 0.1), ("optimizer+parameters", 0.2)])
@pytest.mark.parametrize("zero", [0, slow(2)])
@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_what_waits_on_hosts_takes_about_what_its_plan_takes(offload: str, error: float, zero: int, num_ranks: int) -> None:
    graph = GPT(layers=3, hidden=1024, heads=16, sequence=512, vocabulary=30_000).graph()
    cluster = parse_cluster("hosts: [{name: a, devices: 2 x V100-32GB}]")
    forms = ClosedForms(seater_of(graph, cluster, Config({"memory.offload": offload, "memory.zero": str(zero)}), 16))
    ranks = (RankSpec(cluster.devices[0].kind),) * num_ranks
    for number in (1, 4):
        replica = ReplicaSpec(ranks, 2 // num_ranks, schedule="1f1b", num_chunks=1, num_micro_batch=number, recompute="none")
        strategy = Strategy((replica,), near=True)
        planned = forms.planner.realize(forms.places.named(strategy)).plan.step_seconds
        assert forms.of(strategy).seconds == pytest.approx(planned, rel=error)


@pytest.mark.parametrize("zero", ["2", "3"])
def test_a_pipeline_keeps_all_of_its_state_itself(zero: str) -> None:
    """Nobody else holds its stages; two replicas keep half of each parameter's state each."""
    graph, cluster = layers([64] * 8), made([[(1e9, GIB)] * 8], network=1e9)
    held = {}
    for setting in ("0", zero):
        forms = ClosedForms(seater_of(graph, cluster, Config({"memory.zero": setting}), 8))
        for count in (1, 2):
            ranks = (RankSpec(cluster.devices[0].kind),) * 4
            replica = ReplicaSpec(ranks, count, schedule="1f1b", num_chunks=1, num_micro_batch=2, recompute="none")
            solvers = [forms.planner.solver(replica, "none", forms.planner.pricing_for((replica,), "none"))]
            held[setting, count] = solvers[0].tables.points.held.state
    assert held[zero, 1] == held["0", 1] == held["0", 2]
    assert held[zero, 2] < 0.8 * held[zero, 1]


@pytest.mark.parametrize(("hosts", "rules"), [(1, {True}), (2, {True, False})])
def test_devices_of_one_host_are_placed_by_one_rule(hosts: int, rules: set[bool]) -> None:
    space = space_of(layers([64] * 4), made([[(1e9, GIB)] * 6] * hosts, network=1e9), 8)
    assert {each.near for each in space.space.lineups(space.alone)} == rules


@pytest.mark.parametrize(
    ("cards", "pairs", "bandwidth"),
    [((), False, 0), ((None, None), False, 1e6), ((None, None), True, 1e5), ((4e5, 4e5, 1), False, 4e5), ((4e6, None), False, 1e6)],
    ids=["one host", "network", "pairs", "cards of used hosts, one device each", "a faster card"],
)
def test_copies_are_ranked_by_the_links_that_they_take(cards: tuple[float | None, ...], pairs: bool, bandwidth: float) -> None:
    """A pipeline of two stages, each on a host of two devices."""
    graph, found = layers([64] * 4), made([[(1e9, GIB)] * 2] * max(1, len(cards)), network=1e6)
    found = replace(found, hosts=tuple(replace(host, card=card) for host, card in zip(found.hosts, cards or (None,), strict=True)))
    if pairs:
        found = replace(found, network=None, pairs=((("h0", "h1"), Link(1e5, 1e-5)),))
    elif not cards:
        found = replace(found, network=Link(1e6, 1e-5))
    kind = found.devices[0].kind
    names = (("h0/0",), ("h1/0",)) if cards else (("h0/0",), ("h0/1",))
    own = ReplicaSpec((RankSpec(kind),) * 2, names=names, schedule="1f1b", num_chunks=1, num_micro_batch=2, recompute="none")
    forms = [ClosedForms(seater_of(graph, found, Config({"memory.redundancy": number}), 16)) for number in (0, 1)]
    plain, copied = (each.of(Strategy((own,))).seconds for each in forms)
    assert copied - plain == pytest.approx(3 * 4 * (4 * 64 * 64) / 2 / bandwidth if bandwidth else 0.0)


def test_gradients_that_go_to_keepers_as_they_are_made_are_not_counted_together() -> None:
    graph, weights = layers([64] * 16), 16 * 64 * 64 * 4
    cluster = made([[(1e9, round(2.2 * weights))] * 4], network=1e9)
    settings = Config({"memory.zero": "2", "communication.bucket_bytes": 1, "memory.fraction": 1.0})
    forms = ClosedForms(seater_of(graph, cluster, settings, 4))
    rank = RankSpec(cluster.devices[0].kind)
    replica = ReplicaSpec((rank,), 4, schedule="1f1b", num_chunks=1, num_micro_batch=1, recompute="none")
    strategy = Strategy((replica,), near=True)
    assert len(forms.planner.realize(forms.places.named(strategy)).plan.replicas) == 4
    assert forms.shortage(replica, 1) == 0 and forms.of(strategy).lack == 0
    whole, let_go = forms.planner.points.held.state, forms.planner.prices.let_go(float(weights), Budget(sums_at_once=True))
    assert forms.shortage(replica, 2) == int(whole) - forms.room(replica) > 0, "several micro-batches add theirs up"
    assert [forms.least(strategy, number)[1] for number in (1, 2)] == [whole - let_go, whole]
    one, two = forms.relaxed(strategy, [ORDERS[0]], [1, 2])[1]
    assert one == pytest.approx(forms.of(strategy).held) and two - one > 0.9 * let_go


@pytest.mark.parametrize("more", [{}, {"gradient.dtype": "bf16"}], ids=["own type", "rounded"])
@pytest.mark.parametrize("num_rows", [4, 64])
def test_what_is_let_go_is_no_more_than_the_estimate_finds(more: dict[str, object], num_rows: int) -> None:
    cluster = made([[(1e9, GIB)] * 4], network=1e9)
    settings = Config({"memory.zero": "2", "communication.bucket_bytes": 64 * 64 * 4, **more})
    forms = ClosedForms(seater_of(layers([64] * 16), cluster, settings, num_rows))
    replica = ReplicaSpec((RankSpec(cluster.devices[0].kind),), 4, schedule="1f1b", num_chunks=1, num_micro_batch=1, recompute="none")
    strategy = Strategy((replica,), near=True)
    fullest = max(each.peak.total for each in forms.planner.realize(forms.places.named(strategy)).step.devices)
    assert fullest <= forms.of(strategy).held <= 1.5 * fullest


@st.composite
def tight(draw: st.DrawFn) -> tuple[ModelGraph, Cluster, Config, int]:
    """A model in pipelines on devices of which some have too little memory for much of it."""
    widths = draw(st.lists(st.sampled_from([16, 32, 64]), min_size=4, max_size=16))
    num_stages, num_replicas = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    dtype, size = draw(st.sampled_from([None, "bf16"])), draw(st.sampled_from([1, 4096, 16384, 49152]))
    mode, share = draw(st.sampled_from(["train", "predict"])), draw(st.floats(0.1, 1.1))
    return tight_of(widths, mode, num_stages, num_replicas, share, size, dtype, num_replicas * draw(st.sampled_from([1, 4, 32])))


def tight_of(
    widths: list[int], mode: str, num_stages: int, num_replicas: int, share: float, bucket_bytes: int, dtype: str | None, num_rows: int
) -> tuple[ModelGraph, Cluster, Config, int]:
    """`share` is that of what training, or predicting, holds of all parameters which the first device of each replica has room for."""
    graph = replace(layers(widths), mode=mode)
    needed = sum(each.spec.num_bytes for each in graph.parameters) * (4 if mode == "train" else 1)
    hosts = [[(8e9, round(needed * share / 0.9)), *[(1e9, GIB)] * (num_stages - 1)]] * num_replicas
    settings = {
        "memory.zero": "2",
        "communication.bucket_bytes": bucket_bytes,
        "planning.search": "off",
        "pipeline.num_stages": num_stages,
        "pipeline.num_micro_batch": 1,
        "recompute.policy": "none",
    }
    return graph, made(hosts, network=1e9), Config(settings | ({"gradient.dtype": dtype} if dtype else {})), num_rows


@at_most(100, derandomize=True)  # plans are decided in so many rounds at most: the law was seen to hold, and is not proven
@given(tight())
@example(tight_of([64] * 16, "predict", 2, 3, 0.6, 1, None, 12))
@example(tight_of([64] * 16, "train", 2, 3, 0.45, 1, "bf16", 12))
@example(tight_of([64] * 16, "train", 2, 3, 0.3, 16384, None, 12))
def test_what_fits_with_all_gradients_together_fits_as_they_are_let_go(case: tuple[ModelGraph, Cluster, Config, int]) -> None:
    graph, cluster, config, num_rows = case
    with mock.patch.object(Prices, "spared_share", lambda *_: 0.0):
        try:
            make_plan(graph, cluster, config, rows=num_rows)
        except WhaleError:
            return
    make_plan(graph, cluster, config, rows=num_rows)


def test_replicas_of_unlike_micro_batches_have_their_gradients_together() -> None:
    graph, cluster = layers([64] * 16), made([[(1e9, GIB)] * 4], network=1e9)
    config = Config({"memory.zero": "2", "communication.bucket_bytes": 1})
    one, two = (shape_pipeline(config.with_values({"pipeline.num_micro_batch": number}), None, 1) for number in (1, 2))
    planner = seater_of(graph, cluster, config, 4)
    names = tuple(each.name for each in graph.parameters)
    part = Part(tuple(planner.points.spine), names, ())
    for pipelines in ([one, one], [one, two]):
        prices, budget = planner.prices, planner.pricing.kept_by(pipelines).budget
        tables = StageTables(planner.points, planner.pieces, prices, one, KEEP_ALL, budget)
        held = tables.loads((("h0/0",),), 1, (0, planner.points.num_units))[0]
        whole = prices.part(part, 1.0, budget=budget).parameter_bytes
        with mock.patch.object(Prices, "spared_share", lambda *_: 0.0):
            lets_go = tables.loads((("h0/0",),), 1, (0, planner.points.num_units))[0] - held
        assert lets_go == sum(prices.parameter_bytes(name, budget) for name in names) - whole
        assert (lets_go > 0) == (pipelines[1] is one)


def test_each_rank_sums_over_the_links_between_its_own_devices() -> None:
    cluster = made([[(1e9, GIB)] * 2, [(1e9, GIB)], [(1e9, GIB)], [(1e9, GIB)] * 2], network=1e6)
    places = Places(seater_of(layers([64]), cluster, Config(), 8).prices)
    rank, names = RankSpec(cluster.devices[0].kind), [device.name for device in cluster.devices]
    pipelines, copies, bucket = ReplicaSpec((rank,) * 2, 2), ReplicaSpec((rank,), 2), float(places.prices.costs.bucket_bytes)
    for replicas, near, owners in (
        ((pipelines,), False, [(0, 1), (2, 3)]),
        ((pipelines,), True, [(0, 2), (1, 3)]),
        ((copies, pipelines), False, [(0, 1, 2, 3), (0, 1, 4, 5)]),
    ):
        rates = places.sums(places.firsts(Strategy(replicas, near=near)))[-1]
        expected = [all_reduce_seconds(cluster, [names[number] for number in own], bucket) for own in owners]
        assert [rate.at(bucket) for rate in rates] == pytest.approx(expected)


def test_split_groups_are_as_many_as_hosts_have_room_for() -> None:
    cluster = made([[(1e9, GIB)] * 5, [(1e9, GIB)] * 5], network=1e6)
    free = space_of(layers([64] * 8), cluster, 64)
    found = list(free.space.lineups(free.alone))
    for width, most in ((1, 10), (2, 4), (4, 2)):
        widths = [(own, {rank.width for rank in own.ranks or ()}) for strategy in found for own in strategy.replicas]
        assert max(own.count * own.num_ranks for own, each in widths if each == {width}) == most


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_a_cut_that_is_found_soon_is_near_the_best(units: list[int], num_stages: int) -> None:
    sums = np.concatenate(([0.0], np.cumsum(units))).tolist()
    if len(units) < num_stages:
        return
    bounds = _least([sums] * num_stages, len(units), None)
    every = combinations(range(1, len(units)), num_stages - 1)
    best = min(max(sums[b] - sums[a] for a, b in pairwise((0, *inner, len(units)))) for inner in every)
    assert bounds is not None and bounds[0] == 0 and bounds[-1] == len(units)
    assert max(sums[b] - sums[a] for a, b in pairwise(bounds)) <= best * 1.01


@pytest.mark.parametrize("number", range(1, 20, 2))
def test_stages_wait_for_what_they_are_sent_and_no_more(number: int) -> None:
    """What is read further on passes no stage between; what stays on a rank is not sent, nor are gradients of weights that it shares."""
    graph, cluster = drawn_graph(random.Random(number), scoped=False), made([[(1e9, GIB)] * 3], network=1e9)
    forms = ClosedForms(seater_of(graph, cluster, Config(), 8))
    points, prices = forms.planner.points, forms.planner.prices
    for num_ranks, num_chunks in ((2, 2), (3, 1), (2, 1)):
        if points.num_units < num_ranks * num_chunks:
            continue
        schedule = "1f1b" if num_chunks == 1 else "interleaved"
        replica = ReplicaSpec((RankSpec(cluster.devices[0].kind),) * num_ranks, 1, None, schedule, num_chunks, 2, "none")
        ranks = forms.planner.solver(replica, "none").pipeline.stage_rank
        for inner in combinations(range(1, points.num_units), num_ranks * num_chunks - 1):
            units = (0, *inner, points.num_units)
            cut = Partition(tuple(points.bounds[list(units)].tolist()), units, lambda _: 0.0)
            parts = assign(graph, points.structure, wishes_of(points, cut), len(ranks))[0].parts
            passed, sent, read = forms._payloads(units, ranks)
            assert read == {(source, stage) for stage, part in enumerate(parts) for source, *_ in prices.part(part, 4.0).sends}
            for stage, part in enumerate(parts):
                sends = [own for own in prices.part(part, 4.0).sends if ranks[own[0]] != ranks[stage]]
                if stage:
                    assert sent[1, stage - 1] == sum(line.per_row for _, line, _ in sends)
                    assert sent[2, stage - 1] == sum(number for _, _, number in sends)
                    assert passed[1, stage - 1] == sum(line.per_row for source, line, _ in sends if source == stage - 1)
            readers = [{ranks[stage] for stage, part in enumerate(parts) if each.name in part.parameters} for each in graph.parameters]
            assert (points.read_apart(units, ranks) > 0) == any(len(own) > 1 for own in readers)
