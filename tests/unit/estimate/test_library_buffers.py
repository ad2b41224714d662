"""Buffers of NCCL in the estimate: of the communicators that the runtime opens, on GPUs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.unit.planning.graphs import chain, device
from whale.config import Config
from whale.errors import PlanError
from whale.estimate import Costs, estimate
from whale.estimate.costs.communicators import GROUP_BYTES, MIB, PAIR_BYTES, WAY_BYTES, num_channels
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import MemoryShortage, make_plan
from whale.planning.verify import verify
from whale.schedules import schedules_of
from whale.sharding.communicators import communicators_of
from whale.sharding.parameters import parameter_shardings

FAST, SLOW = Link(115e9, 1e-6), Link(1e9, 1e-6)
ROOMY = 2**33


def gpus(*counts: int, memory: int = ROOMY, host_link: float = 1e10) -> Cluster:
    """Hosts of so many GPUs, over NVLink inside."""
    hosts = []
    for number, count in enumerate(counts):
        own = (replace(device(f"h{number}/{index}", f"h{number}", memory=memory), host_link=host_link) for index in range(count))
        hosts.append(Host(f"h{number}", tuple(own), FAST))
    return Cluster("gpus", tuple(hosts), SLOW)


def planned(there: Cluster, **settings: object) -> tuple[Plan, ModelGraph]:
    graph = chain(4, width=64)
    return make_plan(graph, there, Config({f"pipeline.{name}": value for name, value in settings.items()}), rows=16), graph


def held(plan: Plan, graph: ModelGraph, there: Cluster, costs: Costs | None = None) -> Mapping[str, float]:
    step = estimate(plan, graph, there, costs)
    return {name: step.of(name).peak.communicators for name in plan.devices}


@pytest.mark.parametrize(
    ("bandwidth", "number"), [(1e9, 2), (10e9, 2), (20e9, 2), (62e9, 6), (115e9, 12), (230e9, 24), (345e9, 32), (1e15, 32)]
)
def test_channels_are_those_that_were_seen(bandwidth: float, number: int) -> None:
    assert num_channels(bandwidth) == number


def test_data_parallel_devices_have_one_for_all() -> None:
    plan, graph = planned(gpus(2))
    assert set(held(plan, graph, gpus(2)).values()) == {12 * PAIR_BYTES}
    plan, graph = planned(gpus(2, 2))
    assert set(held(plan, graph, gpus(2, 2)).values()) == {2 * GROUP_BYTES}, "between hosts two channels"


@pytest.mark.parametrize("settings", [{"schedule": "gpipe"}, {"schedule": "1f1b"}])
def test_a_pipeline_has_two_ways_to_each_neighbour(settings: dict[str, object]) -> None:
    there = gpus(2, 1)
    plan, graph = planned(there, num_stages=3, num_micro_batch=4, **settings)
    world, near, far = 2 * GROUP_BYTES, 2 * 12 * WAY_BYTES, 2 * 2 * WAY_BYTES
    assert [*held(plan, graph, there).values()] == [world + near, world + near + far, world + far]


def test_the_estimate_counts_what_the_runtime_opens() -> None:
    there = gpus(2, 2)
    for settings in ({"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "zb_v", "num_chunks": 2}):
        plan, graph = planned(there, num_stages=2, num_micro_batch=4, **settings)
        opened = communicators_of(plan, graph, parameter_shardings(plan, graph, None), schedules_of(plan), 4)
        members = [*opened.groups, *(ways[0] for ways in opened.channels)]
        expected = [float(MIB * sum(rank in ranks for ranks in members)) for rank in range(4)]
        assert [*held(plan, graph, there, Costs(communicator_bytes=MIB)).values()] == expected


def test_gloo_has_none_and_nor_has_a_device_alone() -> None:
    for there in (gpus(2, host_link=0.0), gpus(1)):
        plan, graph = planned(there)
        assert set(held(plan, graph, there).values()) == {0.0}
    mixed = gpus(2)
    (host,) = mixed.hosts
    mixed = replace(mixed, hosts=(replace(host, devices=(host.devices[0], replace(host.devices[1], host_link=0.0))),))
    plan, graph = planned(mixed)
    assert set(held(plan, graph, mixed).values()) == {0.0}, "beside a CPU all goes over Gloo"
    (host,) = gpus(2).hosts
    parts = Cluster("parts", (replace(host, devices=tuple(replace(each, sharers=2) for each in host.devices)),), SLOW)
    plan, graph = planned(parts)
    assert set(held(plan, graph, parts).values()) == {0.0}, "so it does between parts of one GPU"


def test_devices_that_a_plan_leaves_idle_are_in_the_communicator_of_all() -> None:
    plan, graph = planned(gpus(2))
    assert set(held(plan, graph, gpus(4)).values()) == {12 * (PAIR_BYTES + GROUP_BYTES)}
    plan, graph = planned(gpus(1))
    assert set(held(plan, graph, gpus(2)).values()) == {12 * PAIR_BYTES}


def test_they_take_memory_from_a_plan() -> None:
    graph, buffers = chain(4, width=64), 12 * PAIR_BYTES
    there = gpus(2, memory=round((buffers + 100 * 2**10) / 0.9))
    plan = make_plan(graph, there, Config({"estimate.communicator_bytes": "1 MiB"}), rows=16)
    assert set(held(plan, graph, there, Costs(communicator_bytes=MIB)).values()) == {float(MIB)}
    with pytest.raises(MemoryShortage, match=r"needs 280.00 KiB for 8 rows, 100.00 KiB usable"):
        make_plan(graph, there, Config(), rows=16)
    with pytest.raises(PlanError, match=r"short \(communicators 276.00 MiB, "):
        verify(plan, graph, there)
