"""A plan that was made before: refused on other devices, and told with the figures of the devices that there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.errors import PlanError
from whale.ir.cluster import Cluster, Device, Host
from whale.ir.serialization import to_json
from whale.search import decide

GRAPH = layers([64] * 4)
CLUSTER = made([[(1e9, GIB)] * 2], network=1e9)


def changed(**figures: object) -> Cluster:
    """The cluster with other figures of its second device."""

    def other(host: Host) -> Host:
        first, second = host.devices
        assert isinstance(second, Device)
        return replace(host, devices=(first, replace(second, **figures)))

    return replace(CLUSTER, hosts=tuple(map(other, CLUSTER.hosts)))


def test_devices_of_the_same_names_that_are_others_are_refused(tmp_path: Path) -> None:
    plan, _ = decide(None, GRAPH, CLUSTER, Config({"planning.search": "off"}), rows=16)
    path = tmp_path / "plan.json"
    path.write_text(to_json(plan))
    with pytest.raises(PlanError, match=r"made for other device types \(1 x .* in the plan, V900 in random\)") as caught:
        decide(path, GRAPH, changed(model="V900"), Config())
    assert caught.value.where == path
    older = replace(plan, device_models=())  # of which nobody knows
    assert decide(older, GRAPH, changed(model="V900"), Config())[0].devices == plan.devices


def test_figures_are_those_of_the_devices_that_there_are() -> None:
    plan, before = decide(None, GRAPH, CLUSTER, Config({"planning.search": "off"}), rows=16)
    assert decide(plan, GRAPH, CLUSTER, Config())[0] == plan
    slower = changed(flops=(("float32", 1e8),))
    now, step = decide(plan, GRAPH, slower, Config())
    assert now.step_seconds == step.step_seconds > 2 * before.step_seconds
    assert now.choices[0].subject == "figures" and now.replicas[0].stages[0].ops == plan.replicas[0].stages[0].ops
    assert now.replicas[1].stages[0].estimates[0].forward > 2 * plan.replicas[1].stages[0].estimates[0].forward
