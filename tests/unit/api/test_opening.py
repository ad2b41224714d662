"""Which ranks stand for which devices of a cluster file."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from whale.api.opening import Attachment, _match, attach
from whale.comm import World
from whale.config import Config
from whale.config.sections import ClusterSettings
from whale.errors import ClusterError
from whale.hardware import DeviceProfile, make_cluster
from whale.ir.cluster import Cluster, Device, Host, Link

CLUSTER = Cluster(
    "two hosts",
    tuple(
        Host(
            host,
            tuple(Device(f"{host}/{number}", host, "cpu", (("float32", 1e9),), 1 << 30, 1e9) for number in range(count)),
            Link(1e9, 0.0),
        )
        for host, count in (("a", 2), ("b", 1))
    ),
    Link(1e9, 0.0),
)
ALONE = World(0, 1, 0, 1, torch.device("cpu"), timedelta())


def test_devices_that_are_not_there_are_left_out_where_a_cluster_may_be_partial(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError, match=r"cluster .* has 3 devices, but 1 rank started"):
        attach(ClusterSettings(), ALONE, CLUSTER)
    found = attach(ClusterSettings(partial=True), ALONE, CLUSTER)
    assert [device.name for device in found.cluster.devices] == [*found.rank_of] == [CLUSTER.devices[0].name]
    assert "1 of 3 devices of cluster" in capsys.readouterr().err


def test_a_rank_stands_for_a_device_of_its_own_host_first_and_of_its_own_model_next() -> None:
    profiles = [DeviceProfile(host, model, 1) for host, model in (("b", "cpu"), ("c", "unlike"), ("d", "cpu"))]
    assert _match(CLUSTER, profiles) == {"b/0": 0, "a/0": 2, "a/1": 1}
    assert _match(CLUSTER, profiles[:2]) == {"b/0": 0, "a/0": 1}


def test_a_rank_without_a_device_has_the_half_type_of_its_own() -> None:
    models = ("A100-80GB", "V100-32GB", "T4", "3090", "unlike")
    profiles = [DeviceProfile("h", model, 1 << 30) for model in models]
    cluster, _ = make_cluster(profiles[:3])
    part = Attachment(cluster.only({"h/0", "h/1"}), {"h/0": 0, "h/1": 1, "h/2": 2}, profiles)
    found = [part.precision(Config({"precision.dtype": "half"}), rank) for rank in range(len(models))]
    assert [each and each.dtype for each in found] == ["bfloat16", "float16", "float16", "bfloat16", "bfloat16"]
