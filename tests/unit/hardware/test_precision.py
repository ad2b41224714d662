"""Which type ops compute in, by the setting and what the devices have."""

from __future__ import annotations

import pytest

from whale.config import Config, load_config
from whale.errors import ConfigError
from whale.hardware import compute_type, parse_cluster
from whale.ir.precision import Precision


def found(dtype: str, devices: str) -> str | None:
    hosts = "".join(f"  - {{name: h{number}, devices: 1 x {model}}}\n" for number, model in enumerate(devices.split(", ")))
    made = compute_type(Config({"precision.dtype": dtype}), parse_cluster(f"name: c\nnetwork: infiniband-hdr\nhosts:\n{hosts}"))
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
        ({"*": "tf32"}, r"\*: 'tf32' is not one of float32, bf16, fp16, auto"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config({"precision.dtype": wrong})


def test_a_device_that_lacks_a_type_is_named_with_what_all_have() -> None:
    with pytest.raises(ConfigError, match=r"precision.dtype: bf16 is not supported by h1/0 \(T4\)") as caught:
        found("bf16", "A100-80GB, T4")
    assert caught.value.hint is not None and "precision.dtype: fp16" in caught.value.hint
