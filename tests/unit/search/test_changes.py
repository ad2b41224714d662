"""Clusters with one thing changed."""

from __future__ import annotations

from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster
from whale.search.changes import faster_between, one_more, with_plenty

CLUSTER = parse_cluster(
    "name: mixed\nhosts:\n  - {name: big, devices: 2 x V100-32GB, card: 5 GB/s}\n  - {name: one, devices: T4}\nnetwork: ethernet-25g\n"
    "pairs: [{hosts: [big, one], link: ethernet-10g}]\n"
)
V100, T4 = CLUSTER.devices[0].kind, CLUSTER.devices[2].kind


def names(cluster: Cluster) -> list[str]:
    return [device.name for device in cluster.devices]


def test_one_more_is_beside_its_like_or_on_a_host_of_its_own() -> None:
    more, where = one_more(CLUSTER, V100)
    assert (names(more), where) == (["big/0", "big/1", "big/2", "one/0"], "in host big")
    assert more.by_name["big/2"].kind == V100
    more, where = one_more(CLUSTER, T4)
    assert (names(more)[3:], where) == (["one-like/0"], "on a host like one")
    assert more.by_name["one-like/0"].kind == T4 and more.link("one/0", "one-like/0") == CLUSTER.network
    assert names(one_more(CLUSTER.only(["big/1"]), V100)[0]) == ["big/1", "big-like/0"]
    alone = parse_cluster("hosts: [{name: a, devices: T4}]\n")
    assert names(one_more(alone, T4)[0]) == ["a/0", "a/1"]


def test_a_host_of_its_own_has_a_name_of_its_own() -> None:
    cluster = parse_cluster("hosts: [{name: a, devices: T4}, {name: a-like, devices: V100-32GB}]\nnetwork: ethernet-25g\n")
    once, _ = one_more(cluster, T4)
    twice, _ = one_more(once, T4)
    assert names(twice) == ["a/0", "a-like/0", "a-like1/0", "a-like2/0"]


def test_one_more_in_a_host_with_a_price_is_not_free() -> None:
    host = "{name: a, devices: 2 x T4, price_per_hour: 4}"
    cluster = parse_cluster(f"hosts: [{host}, {{name: b, devices: V100-32GB, price_per_hour: 3}}]\nnetwork: ethernet-25g\n")
    assert one_more(cluster, T4)[0].price_per_hour(["a/2"]) == 6
    grown = one_more(cluster, V100)[0]
    assert grown.price_per_hour(["b-like/0"]) == 3 and grown.price_per_hour(names(grown)) == 10


def test_faster_links_and_plenty_of_memory() -> None:
    between = faster_between(CLUSTER, 2)
    for pair in (("big/0", "one/0"), ("big/0", "big/1")):
        assert between.link(*pair).bandwidth == CLUSTER.link(*pair).bandwidth * (1 if pair[1] == "big/1" else 2)
    assert between.card("big") == 1e10
    assert min(device.memory for device in with_plenty(CLUSTER).devices) == 1 << 50
