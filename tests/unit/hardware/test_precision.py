"""Which type ops compute in, by the setting and what the devices have."""

from __future__ import annotations

import pytest

from whale.config import Config, load_config
from whale.errors import ConfigError
from whale.hardware import compute_type, half_type, parse_cluster
from whale.ir.cluster import Cluster
from whale.ir.precision import HALF, Precision


def cluster_of(devices: str) -> Cluster:
    hosts = "".join(f"  - {{name: h{number}, devices: 1 x {model}}}\n" for number, model in enumerate(devices.split(", ")))
    return parse_cluster(f"name: c\nnetwork: infiniband-hdr\nhosts:\n{hosts}")


def found(dtype: str, devices: str) -> str | None:
    made = compute_type(Config({"precision.dtype": dtype}), cluster_of(devices))
    return None if made is None else made.dtype


@pytest.mark.parametrize(
    ("dtype", "devices", "expected"),
    [
        ("float32", "A100-80GB", None),
        ("tf32", "A100-80GB", None),
        ("bf16", "A100-80GB", "bfloat16"),
        ("fp16", "V100-32GB, T4", "float16"),
        ("auto", "A100-80GB, A100-80GB", "bfloat16"),
        ("auto", "A100-80GB, T4", "float16"),
        ("auto", "cpu", None),
        ("bf16", "cpu", "bfloat16"),
        ("half", "V100-32GB, A100-80GB", HALF),
        ("half", "V100-32GB", HALF),
    ],
)
def test_the_type_that_ops_compute_in(dtype: str, devices: str, expected: str | None) -> None:
    assert found(dtype, devices) == expected


def test_types_by_name() -> None:
    cluster = parse_cluster("name: c\nnetwork: infiniband-hdr\nhosts:\n  - {name: h, devices: 1 x T4}\n")
    mixed = Config({"precision": {"dtype": {"*norm*": "float32", "*": "auto"}}})
    assert compute_type(mixed, cluster) == Precision("float16", (("*norm*", True), ("*", False)))
    assert compute_type(Config({"precision.dtype": {"*": "float32"}}), cluster) is None
    assert Config(dict(mixed.explicit_items())) == mixed and load_config(None, environment={"WHALE_PRECISION_DTYPE": '{"*": bf16}'})
    for wrong, message in (
        ({"*": "bf16", "*norm*": "float32"}, r"precision.dtype does not end with the pattern '\*'.*the last is \*norm\*"),
        ({}, "there is none"),
        ({"a": "bf16", "*": "fp16"}, "has bf16 and fp16; it can have one type besides float32"),
        ({"*": "tf32"}, r"\*: 'tf32' is not one of float32, bf16, fp16, auto, half"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config({"precision.dtype": wrong})


def test_a_device_that_lacks_a_type_is_named_with_what_all_have() -> None:
    with pytest.raises(ConfigError, match=r"precision.dtype: bf16 is not supported by h1/0 \(T4\)") as caught:
        found("bf16", "A100-80GB, T4")
    assert caught.value.hint is not None and "precision.dtype: fp16" in caught.value.hint


def test_each_device_has_its_own_half_type() -> None:
    cluster = cluster_of("A100-80GB, V100-32GB, 3090, T4, P100, cpu")
    assert [half_type(device) for device in cluster.devices] == ["bfloat16", "float16", "bfloat16", "float16", "float16", "bfloat16"]
    made = compute_type(Config({"precision.dtype": {"*norm*": "float32", "*": "half"}}), cluster)
    assert made == Precision(HALF, (("*norm*", True), ("*", False)), by_device=True)


@pytest.mark.parametrize(("bfloat16", "expected"), [("2.5 TFLOP/s", "float16"), ("11.9 TFLOP/s", "float16"), ("12 TFLOP/s", "bfloat16")])
def test_bfloat16_that_a_measured_device_only_emulates_is_not_chosen(bfloat16: str, expected: str) -> None:
    flops = f"{{float32: 4.2 TFLOP/s, float16: 24 TFLOP/s, bfloat16: {bfloat16}}}"
    measured = f"{{model: T4, memory: 14 GiB, bandwidth: 240 GB/s, efficiency: 1, flops: {flops}}}"
    cluster = parse_cluster(f"name: c\nnetwork: infiniband-hdr\nhosts:\n  - {{name: h0, devices: [{measured}]}}\n")
    assert half_type(cluster.devices[0]) == expected
    found = {dtype: compute_type(Config({"precision.dtype": dtype}), cluster) for dtype in ("auto", "bf16", "fp16")}
    assert {dtype: None if each is None else each.dtype for dtype, each in found.items()} == {
        "auto": expected,
        "bf16": "bfloat16",
        "fp16": "float16",
    }


def test_a_device_with_neither_half_type_is_named_with_what_it_has() -> None:
    old = parse_cluster(
        "name: c\nnetwork: infiniband-hdr\nhosts:\n  - {name: h0, devices: 1 x A100-80GB}\n"
        "  - {name: h1, devices: [{model: old, memory: 8 GiB, bandwidth: 100 GB/s, efficiency: 1, flops: {float32: 2 TFLOP/s}}]}\n"
    )
    with pytest.raises(ConfigError, match=r"half finds neither bfloat16 nor float16 on h1/0 \(old\): old has float32") as caught:
        compute_type(Config({"precision.dtype": "half"}), old)
    assert caught.value.hint is not None and "cluster.devices" in caught.value.hint and "flops" in caught.value.hint
