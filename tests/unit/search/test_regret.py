"""With its usual effort the search finds what is as good as the best (examples/benchmarks/regret.py draws more, and larger ones)."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from tests.unit.search.exhaustive import space_of
from whale.config import Config
from whale.hardware import parse_cluster
from whale.planning.strategy import RankSpec, ReplicaSpec, Strategy
from whale.search import search

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "benchmarks"))

from regret import Every, counts, drawn_case, every_placement, outcome


def test_unlike_devices_are_one_split_group_where_that_is_fastest() -> None:
    _, _, graph, cluster, rows = drawn_case(13, 2)
    found = search(graph, cluster, Config(), rows=rows)
    assert str(found.strategy) == "1 x (split over 1.28954e+09 + 1.04415e+09), 1 micro-batch"
    assert found.strategy.taken == {device.kind: 1 for device in cluster.devices}
    again = search(graph, cluster, Config(), rows=rows, start=[found.strategy], effort=1)  # which devices, its names alone would say
    assert again.value <= found.value


def test_groups_that_no_host_has_are_in_the_space() -> None:
    _, _, graph, _, rows = drawn_case(13, 2)
    cluster = parse_cluster("hosts: [{name: a, devices: 3 x T4}, {name: b, devices: 1 x T4}]\nnetwork: ethernet-25g")
    space = space_of(graph, cluster, rows).space
    assert space.widths[cluster.devices[0].kind] == (1, 2, 3)
    spread = [[each.names for each in strategy.replicas] for strategy in space.spread()]
    two, three, four = (("a/0", "b/0"),), (("a/0", "a/1", "b/0"),), (("a/0", "a/1", "a/2", "b/0"),)
    assert spread == [[two], [two, (("a/1",),), (("a/2",),)], [three], [three, (("a/2",),)], [four]]


def test_all_placements_of_two_devices() -> None:
    same = parse_cluster("hosts: [{name: a, devices: 2 x T4}]")
    unlike = parse_cluster("hosts: [{name: a, devices: [T4, P100]}]")
    assert [len(list(every_placement(each))) for each in (same, unlike)] == [4, 6]  # alone, copies, a pipeline each way, a group
    assert counts(12, 9) == [1, 2, 3, 4, 6, 8]


@pytest.mark.slow
def test_little_is_given_away() -> None:
    regrets = [outcome(number, 2).regret for number in (1, 3, 5, 7, 13, 17)]
    assert max(regrets) <= 0.05 and sum(regrets) / len(regrets) <= 0.005, regrets


@pytest.mark.parametrize("number", [11, 20, 26, 49])
def test_little_is_given_away_where_memory_is_short(number: int) -> None:
    """A pipeline; groups over two hosts, or of unlike devices: with blocks computed again that leave room for a faster cut, and with more
    micro-batches than activations alone need.
    """
    found = outcome(number, 2, is_scarce=True)
    assert found.found and found.regret <= 0.005, found


def test_a_group_over_hosts_beside_a_single_device_is_found() -> None:
    found = outcome(23, 3)
    assert found.regret <= 0.005, found


def test_branches_of_a_model_that_run_at_once_are_found() -> None:
    """Chunks of a pipeline with one micro-batch, of which some do not read what the one before them makes."""
    found = outcome(29, 2)
    assert found.regret <= 0.005, found


def test_what_a_group_over_hosts_takes_is_known_before_it_is_planned() -> None:
    """Only the ops that gain by it are divided; in the plan some of their messages hide behind computing."""
    _, _, graph, cluster, rows = drawn_case(22, 3)
    forms = space_of(graph, cluster, rows).forms
    for group in (cluster.devices[:2], cluster.devices):
        own = ReplicaSpec((RankSpec.of(group),), 1, (tuple(device.name for device in group),), "1f1b", 1, 1, "auto")
        strategy = Strategy((own,))
        planned = forms.planner.realize(strategy).plan.step_seconds
        assert 0.9 * planned <= forms.spread_seconds(strategy, 1) <= 1.2 * planned


@pytest.mark.parametrize("number", [7, 13])
def test_of_many_plans_some_are_drawn_and_those_near_the_best_tried(number: int) -> None:
    _, _, graph, cluster, rows = drawn_case(number, 2)
    some, every = Every(graph, cluster, rows), Every(graph, cluster, rows)
    some.look(number, 10)
    every.look(number, 1000)
    assert some.num_plans < every.num_plans
    assert some.best[1] == every.best[1] < math.inf
