"""With its usual effort the search finds what is as good as the best (examples/benchmarks/regret.py draws more, and larger ones)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.search.exhaustive import space_of
from whale.config import Config
from whale.hardware import parse_cluster
from whale.search import search

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "benchmarks"))

from regret import counts, drawn_case, every_placement, outcome


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
    spread = [strategy.replicas[0].names for strategy in space.spread()]
    assert spread == [(("a/0", "b/0"),), (("a/0", "a/1", "b/0"),), (("a/0", "a/1", "a/2", "b/0"),)]


def test_all_placements_of_two_devices() -> None:
    same = parse_cluster("hosts: [{name: a, devices: 2 x T4}]")
    unlike = parse_cluster("hosts: [{name: a, devices: [T4, P100]}]")
    assert [len(list(every_placement(each))) for each in (same, unlike)] == [4, 6]  # alone, copies, a pipeline each way, a group
    assert counts(12, 9) == [1, 2, 3, 4, 6, 8]


@pytest.mark.slow
def test_little_is_given_away() -> None:
    regrets = [outcome(number, 2).regret for number in (1, 3, 5, 7, 13, 17)]
    assert max(regrets) <= 0.05 and sum(regrets) / len(regrets) <= 0.005, regrets
