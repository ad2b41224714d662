"""The closed forms by which strategies are ranked come near the simulation, over links that the devices have."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import slow
from tests.unit.search.exhaustive import seater_of, space_of
from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.estimate import all_reduce_seconds
from whale.hardware import parse_cluster
from whale.planning.cutting.partition import _least
from whale.planning.strategy import RankSpec, ReplicaSpec, Strategy
from whale.search.form import ClosedForms
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


def test_gradients_that_go_to_keepers_as_they_are_made_are_not_counted_together() -> None:
    graph, weights = layers([64] * 16), 16 * 64 * 64 * 4
    cluster = made([[(1e9, round(2.2 * weights))] * 4], network=1e9)
    settings = Config({"memory.zero": "2", "communication.bucket_bytes": 1, "memory.fraction": 1.0})
    forms = ClosedForms(seater_of(graph, cluster, settings, 4))
    rank = RankSpec(cluster.devices[0].kind)
    replica = ReplicaSpec((rank,), 4, schedule="1f1b", num_chunks=1, num_micro_batch=1, recompute="none")
    strategy = Strategy((replica,), near=True)
    assert len(forms.planner.realize(forms.places.named(strategy)).plan.replicas) == 4
    assert forms.shortage(replica) == 0 and forms.of(strategy).lack == 0


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
