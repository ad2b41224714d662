"""Some devices of a cluster by words: what each word takes, and what is left of the cluster."""

from __future__ import annotations

import pytest

from whale.errors import ClusterError
from whale.hardware import parse_cluster, select

CLUSTER = parse_cluster(
    "name: mixed\nhosts:\n  - {name: big, devices: 3 x V100-32GB, price_per_hour: 9}\n  - {name: desk, count: 2, devices: 2 x T4}\n"
    "  - {name: one, devices: A100-80GB}\nnetwork: ethernet-25g\n"
    "pairs: [{hosts: [big, desk0], link: ethernet-10g}, {hosts: [desk0, one], link: ethernet-10g}]\n"
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("V100:2", ["big/0", "big/1"]),
        ("V100:2, desk1/*", ["big/0", "big/1", "desk1/0", "desk1/1"]),
        ("desk1,V100-32GB:1", ["big/0", "desk1/0", "desk1/1"]),
        ("T4", ["desk0/0", "desk0/1", "desk1/0", "desk1/1"]),
        ("desk?/1", ["desk0/1", "desk1/1"]),
        ("T4:1,T4:2", ["desk0/0", "desk0/1", "desk1/0"]),
        ("big/2,*:1", ["big/0", "big/2"]),
    ],
)
def test_words_take_devices(text: str, names: list[str]) -> None:
    assert [device.name for device in select(CLUSTER, text).devices] == names


def test_the_rest_of_the_cluster_stays() -> None:
    found = select(CLUSTER, "big/0,desk0")
    assert [(host.name, host.price_per_hour) for host in found.hosts] == [("big", 9), ("desk0", None)]
    assert (found.name, found.network, len(found.pairs)) == ("mixed", CLUSTER.network, 1)
    assert found.link("big/0", "desk0/1") == CLUSTER.link("big/0", "desk0/1")
    assert select(CLUSTER, "*") == CLUSTER


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("V10", "no device 'V10' in cluster 'mixed'"),
        (
            "V100:4",
            r"V100:4 asks for 4 devices; cluster 'mixed' has 3 of 3 left\n.*V100 takes all that are left",
        ),
        ("V100:0", r"V100:0 asks for 0 devices; .*\n.*leave V100:0 out"),
        ("T4,desk0:1", r"desk0:1 asks for 1 devices; cluster 'mixed' has 0 of 2 left; T4 took the others\n.*leave desk0:1 out"),
        ("big/1, T4, V100:3", r"V100:3 asks for 3 devices; cluster 'mixed' has 2 of 3 left; big/1 took the others"),
        ("", "no device ''"),
    ],
)
def test_words_that_take_nothing_are_faults(text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        select(CLUSTER, text)
