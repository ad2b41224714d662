"""Clusters as text: what is written reads back as the same, and measured figures that are none are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.examples import slow
from whale.errors import ClusterError
from whale.hardware import cluster_text, load_cluster, parse_cluster
from whale.ir.cluster import NO_HANDLING, Cluster, Device, Host, Link
from whale.ir.figure import Figure

CLUSTERS = sorted((Path(__file__).parents[3] / "strategies" / "clusters").glob("*.yaml"))
LARGEST = "a100_3072"
FLOPS = (("bfloat16", 2e10), ("float16", 1.5e9), ("float32", 8.1e10), ("float64", 1.3e10))
SPECIAL = Device(
    "", "b", "it's", (("float32", 1e12),), 2**34, 1e11, 0.5, None, (("float16", 0.25),), half_width=8.0, traffic=0.75, host_seconds=8e-6
)
PROBED = Cluster(
    "no",
    (
        Host("7", (Device("7/0", "7", "cpu", FLOPS, 2**30 + 1, 1.9e10, 1.0, 1.5e-6),), Link(1.9e10, 0.0)),
        Host("b", tuple(replace(SPECIAL, name=f"b/{i}") for i in range(3)), Link(2e9, 6e-5, shared=True), 3e9),
    ),
    Link(1.25e9, 4e-5),
    ((("7", "b"), Link(1e8, 1e-3)),),
    (Figure("7 cpu: memory", "B/s", 1.9e10, 1.8e10, 2.4e10, 22), Figure("7 - b: latency, alone", "s", 4e-5, 3e-5, 5e-5, 11)),
)


def test_a_slowed_device_reads_back() -> None:
    cluster = parse_cluster("name: c\nhosts:\n  - {name: h, devices: [{model: T4, slowdown: 2.5}, T4]}\n")
    assert [device.slowdown for device in parse_cluster(cluster_text(cluster)).devices] == [2.5, 1.0]
    assert cluster.slowed({"h/0": 1.0}) == parse_cluster("name: c\nhosts:\n  - {name: h, devices: 2 x T4}\n")
    with pytest.raises(ClusterError, match="slowdown 0 is not a number above 0"):
        parse_cluster("name: c\nhosts:\n  - {name: h, devices: {model: T4, slowdown: 0}}\n")


def test_parts_of_a_gpu_read_back() -> None:
    cluster = parse_cluster("name: c\nhosts:\n  - {name: h, devices: [{model: T4, count: 2, sharers: 2}, T4]}\n")
    assert [device.sharers for device in parse_cluster(cluster_text(cluster)).devices] == [2, 2, 1]
    assert not cluster.has_nccl and cluster.only({"h/2"}).has_nccl


@pytest.mark.parametrize(("host_link", "expected"), [("", 12e9), (", host_link: 0", 0.0), (", host_link: 30 GB/s", 30e9)])
def test_a_model_that_the_catalogue_lacks_is_a_gpu(host_link: str, expected: float) -> None:
    figures = "memory: 48 GiB, bandwidth: 1 TB/s, flops: {float32: 40 TFLOP/s}, efficiency: 0.6"
    cluster = parse_cluster(f"name: c\nhosts:\n  - {{name: h, devices: {{model: Prototype, {figures}{host_link}}}}}\n")
    assert [each.devices[0].host_link for each in (cluster, parse_cluster(cluster_text(cluster)))] == [expected] * 2
    assert cluster.has_nccl is (expected > 0)


def test_a_device_that_reaches_its_peak_at_any_size_reads_back() -> None:
    cluster = parse_cluster("name: c\nhosts:\n  - {name: h, devices: {model: V100-32GB, half_width: 0}}\n")
    assert parse_cluster(cluster_text(cluster)).devices[0].half_width == cluster.devices[0].half_width == 0


@pytest.mark.parametrize(
    "path", [slow(path, id=path.stem) if path.stem == LARGEST else pytest.param(path, id=path.stem) for path in CLUSTERS]
)
def test_the_clusters_of_the_project_read_back(path: Path) -> None:
    cluster = load_cluster(path)
    again = parse_cluster(cluster_text(cluster))
    assert str(again) == str(cluster)
    assert cluster_text(again) == cluster_text(cluster)
    assert [device.name for device in again.devices] == [device.name for device in cluster.devices]


def test_a_probed_cluster_reads_back(golden: Callable[[str, str], None]) -> None:
    text = cluster_text(PROBED, ["Measured today.", "7: a note"])
    golden("clusters/probed.yaml", text)
    again = parse_cluster(text)
    assert str(again) == str(PROBED)
    assert [device.kind for device in again.devices] == [device.kind for device in PROBED.devices]
    assert cluster_text(again) == cluster_text(PROBED)


def test_noisy_figures_are_told() -> None:
    assert PROBED.warnings == (
        "measured figures vary by more than 25%: 7 - b: latency, alone: 40 us (quartiles 30 us to 50 us of 11 samples), "
        "7 cpu: memory: 19 GB/s (quartiles 18 GB/s to 24 GB/s of 22 samples); measure again while nothing else runs",
    )


def test_what_messages_take_of_a_device_reads_back() -> None:
    kinds = "{model: T4, handling: {seconds: 100 us, bandwidth: 4 GB/s}}, {model: T4, handling: {seconds: 1 us}}, T4"
    text = f"name: c\nhosts:\n  - {{name: h, devices: [{kinds}]}}\n"
    cluster = parse_cluster(text)
    first, second, third = (device.handling for device in parse_cluster(cluster_text(cluster)).devices)
    assert (first.seconds, first.per_byte) == (pytest.approx(1e-4), pytest.approx(1 / 4e9))
    assert (second.seconds, second.per_byte, third) == (pytest.approx(1e-6), 0, NO_HANDLING)
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text.replace("4 GB/s", "0 GB/s").replace("1 us", "-1 us"))
    assert "handling: bandwidth '0 GB/s' is not above 0" in str(caught.value)
    assert "is not an amount in s at least 0" in str(caught.value)
    with pytest.raises(ClusterError, match=r"unknown key 'second' in .*handling"):
        parse_cluster(text.replace("seconds: 1 us", "second: 1 us"))


def test_figures_that_are_none_are_faults_with_their_lines() -> None:
    text = """hosts:
  - {name: a, devices: [T4]}
measured:
  - {figure: 'a T4: memory', value: 300 GB/s, low: 290 GB/s, high: 5 us, samples: 3}
  - {figure: 'a T4: memory', value: 300 GB/s, low: 310 GB/s, high: 320 GB/s, samples: 3}
  - {figure: 'a T4: memory', value: fast, low: 1 s, high: 2 s, samples: 3}
"""
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    said = str(caught.value)
    assert "figure 1: high '5 us' is not an amount in B/s above 0\n  at cluster.yaml:4" in said
    assert "figure 2: value 300 GB/s is not between low and high\n  at cluster.yaml:5" in said
    assert "figure 3: value 'fast' is not an amount in s above 0\n  at cluster.yaml:6" in said


def test_prices_read_back() -> None:
    text = "name: c\nhosts:\n  - {name: h, devices: [{model: T4, price_per_hour: 0.526}, T4], price_per_hour: 0}\n"
    again = parse_cluster(cluster_text(parse_cluster(text)))
    assert [device.price_per_hour for device in again.devices] == [0.526, None] and again.hosts[0].price_per_hour == 0
    with pytest.raises(ClusterError, match=r"price_per_hour .* is not a number of at least 0"):
        parse_cluster(text.replace("0.526", "-1"))
