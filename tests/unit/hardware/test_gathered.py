"""Clusters out of what ranks say of themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.errors import ClusterError
from whale.hardware import DeviceProfile, catalogue, make_cluster
from whale.ir.cluster import Link


def test_ranks_of_a_host_need_not_be_neighbours() -> None:
    profiles = [DeviceProfile("b", "T4", 10), DeviceProfile("a", "V100-32GB", 20), DeviceProfile("b", "T4", 30)]
    cluster, names = make_cluster(profiles)
    assert names == ("b/0", "a/0", "b/1")
    assert [host.name for host in cluster.hosts] == ["b", "a"]
    assert [cluster.by_name[name].memory for name in names] == [10, 20, 30]
    assert cluster.network == catalogue().links["ethernet-25g"]


def test_one_host_has_no_network() -> None:
    cluster, _ = make_cluster([DeviceProfile("a", "cpu", 10, num_cores=0.5)] * 2)
    assert cluster.network is None
    assert cluster.link("a/0", "a/1") == catalogue().links["loopback"]
    assert cluster.devices[0].peak_flops("float32") == dict(catalogue().devices["cpu"].flops)["float32"] / 2


def test_a_network_may_be_given() -> None:
    link = Link(1.0, 2.0)
    cluster, _ = make_cluster([DeviceProfile("a", "T4", 10), DeviceProfile("b", "T4", 10)], network=link)
    assert cluster.link("a/0", "b/0") == link


def test_unlike_devices_of_a_host_have_the_slowest_link() -> None:
    cluster, _ = make_cluster([DeviceProfile("a", "V100-32GB", 10), DeviceProfile("a", "T4", 10)])
    assert cluster.hosts[0].link == catalogue().links["pcie3"]


def test_an_unknown_model_must_describe_itself() -> None:
    with pytest.raises(ClusterError, match="unknown device model 'X' on a"):
        make_cluster([DeviceProfile("a", "X", 10)])
    full = DeviceProfile("a", "X", 10, flops=(("float32", 3.0),), bandwidth=2.0, efficiency=0.5, link=Link(1.0, 1.0))
    cluster, _ = make_cluster([full])
    assert cluster.devices[0].peak_flops("float32") == 3.0
    with pytest.raises(ClusterError, match="no link is known"):
        make_cluster([DeviceProfile("a", "X", 10, flops=(("float32", 3.0),), bandwidth=2.0, efficiency=0.5)])


def test_no_ranks() -> None:
    with pytest.raises(ClusterError, match="has no device"):
        make_cluster([])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["T4", "3090", "cpu"])), min_size=1, max_size=12))
def test_every_rank_has_its_own_device(ranks: list[tuple[str, str]]) -> None:
    cluster, names = make_cluster([DeviceProfile(host, model, memory=rank + 1) for rank, (host, model) in enumerate(ranks)])
    assert len(set(names)) == len(names) == len(cluster.devices)
    for rank, (name, (host, model)) in enumerate(zip(names, ranks, strict=True)):
        device = cluster.by_name[name]
        assert (device.host, device.model, device.memory) == (host, model, rank + 1)
