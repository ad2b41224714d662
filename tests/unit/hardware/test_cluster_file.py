"""Cluster files: what they mean, and every way of getting one wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from whale.config import parse_yaml
from whale.errors import ClusterError
from whale.hardware import catalogue, load_cluster, parse_cluster
from whale.ir.cluster import Cluster, Link
from whale.ir.serialization import from_json, to_json

ROOT = Path(__file__).parents[3]
NETWORK = "network: {bandwidth: 50 Gbit/s, latency: 20 us}\n"
MIXED = (
    "name: v100-t4\n"
    "hosts:\n"
    "  - {name: big, devices: 8 x V100-32GB, link: {bandwidth: 150 GB/s, latency: 5 us}}\n"
    "  - {name: small, count: 2, devices: [T4, T4]}\n" + NETWORK
)


def same(one: Link, other: Link) -> bool:
    return (one.bandwidth, one.latency) == pytest.approx((other.bandwidth, other.latency))


def test_hosts_devices_and_links() -> None:
    cluster = parse_cluster(MIXED)
    assert [host.name for host in cluster.hosts] == ["big", "small0", "small1"]
    assert [device.name for device in cluster.devices][-5:] == ["big/7", "small0/0", "small0/1", "small1/0", "small1/1"]
    assert same(cluster.link("big/0", "big/7"), Link(150e9, 5e-6))
    assert same(cluster.link("big/0", "small1/0"), Link(6.25e9, 20e-6))
    assert cluster.link("small0/0", "small0/1") == catalogue().links["pcie3"]
    device = cluster.by_name["big/0"]
    assert (device.model, device.host, device.peak_flops("float16"), device.peak_flops("float32")) == ("V100-32GB", "big", 125e12, 15.7e12)
    assert device.peak_flops("bfloat16") == 15.7e12
    assert from_json(Cluster, to_json(cluster)) == cluster


def test_count_makes_many_hosts() -> None:
    cluster = parse_cluster("hosts: [{count: 384, devices: 8 x A100-80GB}]\n" + NETWORK)
    assert len(cluster.devices) == 3072
    assert cluster.hosts[-1].name == "host383"
    assert len(cluster.by_name) == 3072


def test_unnamed_hosts_are_numbered() -> None:
    cluster = parse_cluster("hosts: [{devices: T4}, {name: own, devices: T4}, {count: 2, devices: T4}]\n" + NETWORK)
    assert [host.name for host in cluster.hosts] == ["host0", "own", "host1", "host2"]


def test_the_name_of_the_file_is_the_name_of_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("hosts: [{devices: T4}]\n")
    assert load_cluster(path).name == "mine"
    assert load_cluster(str(path)).network is None


def test_overrides() -> None:
    cluster = parse_cluster(
        "hosts:\n"
        "  - devices:\n"
        "      - {model: T4, count: 2, memory: 8 GiB, efficiency: 0.3, bandwidth: 100 GB/s,"
        " flops: {float32: 4 TFLOP/s, bfloat16: 1 TFLOP/s}}\n"
        "      - 3090\n"
        "      - {model: cpu, num_cores: 4}\n"
        "    link: pcie4\n"
    )
    t4, _, gpu, cpu = cluster.devices
    assert (t4.memory, t4.efficiency, t4.bandwidth) == (8 * 2**30, 0.3, 100e9)
    assert dict(t4.flops) == {"float16": 65e12, "float32": 4e12, "float64": 0.254e12, "bfloat16": 1e12}
    assert gpu.model == "3090"
    core = catalogue().devices["cpu"]
    assert dict(cpu.flops)["float32"] == 4 * dict(core.flops)["float32"]
    assert cpu.bandwidth == 4 * core.bandwidth


def test_a_device_described_in_full() -> None:
    figures = "memory: 1 GiB, bandwidth: 1 GB/s, flops: {{float32: 1 TFLOP/s}}, efficiency: 1"
    text = f"hosts: [{{{{devices: [{{{{model: New, count: {{count}}, {figures}}}}}]{{link}}}}}}]\n"
    assert parse_cluster(text.format(count=1, link="")).devices[0].model == "New"
    assert parse_cluster(text.format(count=2, link=", link: pcie3")).hosts[0].link == catalogue().links["pcie3"]
    with pytest.raises(ClusterError, match="host 1 has no link between its devices, and the catalogue has none for New"):
        parse_cluster(text.format(count=2, link=""))


def test_unlike_devices_of_a_host_have_the_slowest_link() -> None:
    cluster = parse_cluster("hosts: [{devices: [V100-32GB, T4]}]\n")
    assert cluster.hosts[0].link == catalogue().links["pcie3"]


def test_pairs() -> None:
    hosts = "hosts: [{name: a, devices: T4}, {name: b, devices: T4}, {name: c, devices: T4}]\n"
    cluster = parse_cluster(hosts + NETWORK + "pairs: [{hosts: [c, a], link: ethernet-10g}]\n")
    assert cluster.link("a/0", "c/0") == cluster.link("c/0", "a/0") == catalogue().links["ethernet-10g"]
    assert same(cluster.link("a/0", "b/0"), Link(6.25e9, 20e-6))
    every = "pairs: [{hosts: [a, b], link: pcie3}, {hosts: [b, c], link: pcie3}, {hosts: [a, c], link: pcie3}]\n"
    assert parse_cluster(hosts + every).network is None
    with pytest.raises(ClusterError, match="there is no link between hosts a and c"):
        parse_cluster(hosts + "pairs: [{hosts: [a, b], link: pcie3}, {hosts: [b, c], link: pcie3}]\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a cluster is empty; it takes the keys name, hosts, network, pairs, measured"),
        ("- a\n", "not a mapping"),
        ("name: x\n", "a cluster lacks 'hosts'"),
        ("hosts: []\n", "is not a list of at least one host"),
        ("hosts: {name: a}\n", "is not a list of at least one host"),
        ("hosts: [a]\n", "host 1 is 'a', not a mapping; it takes the keys name, count, devices, link, card, price_per_hour, memory"),
        ("host: [{devices: T4}]\n", "hint: did you mean 'hosts'?"),
        ("hosts: [{name: a}]\n", "host 1 lacks 'devices'"),
        ("hosts: [{devices: []}]\n", "has no device"),
        ("hosts: [{devices: v100}]\n", "hint: which of V100-16GB, V100-32GB, V100-PCIE-16GB, V100-PCIE-32GB? Or describe it"),
        ("hosts: [{devices: V10}]\n", "hint: which of V100-16GB, V100-32GB, V100-PCIE-16GB, V100-PCIE-32GB? Or describe it"),
        ("hosts: [{devices: T4X}]\n", "unknown device model 'T4X'\n  at cluster.yaml:1\n  hint: did you mean 'T4'?"),
        ("hosts: [{devices: 2 x quux}]\n", "unknown device model 'quux'"),
        ("hosts: [{devices: 0 x T4}]\n", "0 devices is not from 1 to 100000"),
        ("hosts: [{devices: true}]\n", "True is not a device such as"),
        ("hosts: [{devices: [[T4]]}]\n", "is not a device such as"),
        ("hosts: [{devices: {model: T4, count: 0}}]\n", "count 0 is not a whole number from 1 to 100000"),
        ("hosts: [{devices: {model: T4, count: 1.5}}]\n", "count 1.5 is not a whole number"),
        ("hosts: [{devices: {memory: 3 GiB}}]\n", "lacks 'model'"),
        ("hosts: [{devices: {model: T4, memory: 0}}]\n", "memory 0 is not above 0"),
        ("hosts: [{devices: {model: T4, memory: -3}}]\n", "memory -3 is not above 0"),
        ("hosts: [{devices: {model: T4, memory: 3 apples}}]\n", "memory '3 apples' is not an amount in B above 0"),
        ("hosts: [{devices: {model: T4, memory: [1]}}]\n", "memory [1] is not an amount in B above 0"),
        ("hosts: [{devices: {model: T4, memory: 1e999}}]\n", "memory inf is not above 0"),
        ("hosts: [{devices: {model: T4, memory: null}}]\n", "memory None is not an amount in B"),
        ("hosts: [{devices: {model: T4, efficiency: 1.2}}]\n", "efficiency 1.2 is not a number above 0 and at most 1"),
        ("hosts: [{devices: {model: T4, efficiency: 0}}]\n", "efficiency 0 is not a number above 0 and at most 1"),
        ("hosts: [{devices: {model: T4, flops: 3}}]\n", "flops is 3, not a mapping; it takes the keys float64"),
        ("hosts: [{devices: {model: T4, flops: {float33: 3}}}]\n", "hint: did you mean 'float32'?"),
        ("hosts: [{devices: {model: T4, num_cores: 3}}]\n", "num_cores is given for model 'T4'; only model 'cpu' takes it"),
        ("hosts: [{devices: {model: cpu, num_cores: 0}}]\n", "num_cores 0 is not a number above 0"),
        ("hosts: [{devices: {model: Q, memory: 1, bandwidth: 1, flops: {float16: 1}, efficiency: 1}}]\n", "flops lacks 'float32'"),
        ("hosts: [{devices: 2 x T4, link: {bandwidth: 3 GB/s}}]\n", "lacks 'latency'"),
        ("hosts: [{devices: 2 x T4, link: {bandwidth: 0, latency: 0}}]\n", "bandwidth 0 is not above 0"),
        ("hosts: [{devices: 2 x T4, link: {bandwidth: 3 GB, latency: 0}}]\n", "bandwidth '3 GB' is not an amount in B/s above 0"),
        ("hosts: [{devices: 2 x T4, link: pcie9}]\n", "unknown link 'pcie9'"),
        ("hosts: [{devices: 2 x T4, link: null}]\n", "is empty; it takes the keys bandwidth, latency, shared"),
        ("hosts: [{devices: T4}, {devices: T4}]\n", "there is no network between the 2 hosts"),
        ("hosts: [{devices: T4}, {devices: T4}]\nnetwork: null\n", "network is empty; it takes the keys"),
        ("hosts: [{name: a, devices: T4}, {name: a, devices: T4}]\n" + NETWORK, "two hosts are named 'a'\n  at cluster.yaml:1"),
        ("hosts: [{name: a, count: 2, devices: T4}, {name: a1, devices: T4}]\n" + NETWORK, "two hosts are named 'a1'"),
        ("hosts: [{name: [a], devices: T4}]\n", "name ['a'] is not text"),
        ("hosts: [{devices: T4}]\npairs: {a: b}\n", "is not a list of {hosts: [A, B], link: ...}"),
        ("hosts: [{devices: T4}]\npairs: [{hosts: [host0, host0], link: pcie3}]\n", "is not a pair of different hosts"),
        ("hosts: [{devices: T4}, {devices: T4}]\npairs: [{hosts: [host0, host2], link: pcie3}]\n", "there is no host 'host2'"),
        ("hosts: [{devices: T4}, {devices: T4}]\npairs: [{hosts: [host0, host1]}]\n", "pair 1 lacks 'link'"),
        (
            "hosts: [{devices: T4}, {devices: T4}]\npairs: [{hosts: [host0, host1], link: pcie3}, {hosts: [host1, host0], link: pcie3}]\n",
            "the link between host0 and host1 is given twice",
        ),
        ("hosts: [{devices: T4}]\nhosts: []\n", "key 'hosts' is given twice"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    assert message in str(caught.value)
    assert "cluster.yaml:" in str(caught.value)


def test_all_faults_at_once() -> None:
    with pytest.raises(ClusterError, match="3 faults") as caught:
        parse_cluster("hosts:\n  - {name: a, devices: V100-32G}\n  - {name: a, devices: {model: T4, memory: 0 GiB}}\n")
    for part in ("V100-32GB", "0 GiB", "two hosts are named 'a'\n  at cluster.yaml:3"):
        assert part in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read"):
        load_cluster(tmp_path / "none.yaml")


_scalars = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["T4", "2 x T4", "1 GiB", "pcie3", "a", "5 us", ""])
)
_keys = st.sampled_from(
    ["name", "hosts", "network", "pairs", "devices", "link", "count", "model", "memory", "bandwidth", "latency", "flops"]
)
_anything = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4), max_leaves=12)


@at_most(60)
@given(st.dictionaries(_keys, _anything) | st.lists(st.dictionaries(_keys, _anything), max_size=3).map(lambda hosts: {"hosts": hosts}))
def test_anything_is_a_cluster_or_a_cluster_error(data: object) -> None:
    from whale.config import Document
    from whale.hardware.cluster_file import read_cluster

    try:
        cluster = read_cluster(Document("f", data, {}), "f")
    except ClusterError:
        return
    names = [device.name for device in cluster.devices]
    assert names
    assert len(set(names)) == len(names)
    assert all(device.memory > 0 and device.bandwidth > 0 and device.peak_flops("float32") > 0 for device in cluster.devices)
    assert all(cluster.link(names[0], name).seconds(1) > 0 for name in names)


def test_examples_of_the_reference_are_clusters() -> None:
    text = (ROOT / "docs" / "reference" / "cluster.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        assert parse_yaml(block, "docs").data
        assert parse_cluster(block).devices


def test_a_card_that_the_devices_of_a_host_share() -> None:
    found = parse_cluster("hosts:\n  - {devices: 2 x T4, card: 100 Gbit/s}\n  - {devices: 2 x T4}\nnetwork: ethernet-100g\n")
    assert (found.card("host0"), found.card("host1")) == (12.5e9, None)
    assert "one card of 12.5GB/s" in str(found)
