"""The catalogue: NVML's names, complete figures, and the reference page."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale.errors import ClusterError
from whale.hardware import catalogue, parse_cluster
from whale.hardware.catalogue import device_table, link_table, read_catalogue

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla P100-SXM2-16GB", "P100-SXM2"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "3090"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 2080 Ti", "2080Ti"),
        ("NVIDIA TITAN RTX", "TitanRTX"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", None),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("", None),
    ],
)
def test_names_of_nvml(name: str, model: str | None) -> None:
    found = catalogue().match_nvml(name)
    assert (found.name if found else None) == model


def test_every_device_has_its_figures() -> None:
    for name, device in catalogue().devices.items():
        assert device.name == name
        assert device.memory > 2**30
        assert device.link in catalogue().links
        flops = dict(device.flops)
        assert flops["float64"] <= flops["float32"], name
        assert device.flops == tuple(sorted(device.flops))


def test_the_reference_is_up_to_date() -> None:
    text = (ROOT / "docs" / "reference" / "cluster.md").read_text()
    for row in (*device_table().splitlines(), *link_table().splitlines()):
        assert row in text, f"docs/reference/cluster.md lacks {row}; see whale.hardware.catalogue"


def test_a_catalogue_with_faults_is_refused() -> None:
    with pytest.raises(ClusterError, match="4 faults") as caught:
        read_catalogue(
            "links: {a: {bandwidth: 1 GB/s, latency: 1 us}}\nnetwork: b\n"
            "devices: {d: {memory: 0, bandwidth: 1, flops: {float32: 1}, efficiency: 2, link: c, nvml: []}}\n"
        )
    assert "unknown link 'b'" in str(caught.value)
    assert "unknown link 'c'" in str(caught.value)


def test_an_efficiency_may_be_that_of_a_dtype() -> None:
    device = catalogue().devices["V100-32GB"].device("d", "h")
    assert device.reached_flops("float16") == 0.65 * 125e12 and device.reached_flops("float32") == 0.88 * 15.7e12
    assert device.reached_flops("bfloat16") == device.reached_flops("float32")
    for wrong, message in (
        ("{float16: 0.5}", "lacks 'float32'"),
        ("{float32: 2}", "above 0 and at most 1"),
        ("{int7: 1}", "unknown key 'int7'"),
    ):
        with pytest.raises(ClusterError, match=message):
            parse_cluster(f"hosts: [{{devices: {{model: T4, efficiency: {wrong}}}}}]\n")
