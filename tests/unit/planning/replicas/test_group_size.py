"""The group size of interleaving: the table of exposed synchronisation, and the smallest group that exposes least."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import chain, device
from whale.config import Config
from whale.estimate import exposed_sync
from whale.ir.cluster import Cluster, Host, Link
from whale.planning import make_plan
from whale.planning.replicas.group_size import group_sizes


@pytest.mark.parametrize(
    ("p", "v", "m", "sync", "seconds"),
    [
        (4, 4, 16, 16, (60.25, 54.25, 54.25, 54.25)),
        (4, 4, 16, 32, (76.25, 70.25, 58.25, 58.25)),
        (8, 4, 32, 16, (105.25, 105.25, 105.25, 105.25)),
        (8, 4, 32, 32, (121.25, 109.25, 109.25, 109.25)),
    ],
)
def test_times_with_synchronisation(p: int, v: int, m: int, sync: float, seconds: tuple[float, ...]) -> None:
    """F = 1, B = 2 of a whole rank; groups of p, 2p and m, and all in, all out."""
    without = 3 * m + 3 * (p - 1) / v
    found = [without + exposed_sync("interleaved", sync, 2, m, v, group) for group in (p, 2 * p, m)]
    assert (*found, without + exposed_sync("aiao", sync, 2, m, v)) == pytest.approx(seconds)


def test_without_chunks_nothing_is_hidden() -> None:
    assert exposed_sync("1f1b", 5.0, 2.0, 8) == 5.0
    assert exposed_sync("zb_v", 5.0, 2.0, 8, 2) == 5.0


def test_sizes_that_are_looked_at() -> None:
    assert group_sizes(4, 16) == [4, 8, 16]
    assert group_sizes(4, 6) == [4, 6]
    assert group_sizes(4, 2) == [2]


def two_hosts(bandwidth: float, memory: int = 2**30) -> Cluster:
    """Replicas of two devices on a host of their own, with a link of this speed between them."""
    hosts = tuple(Host(f"h{h}", tuple(device(f"h{h}/{i}", f"h{h}", 1e9, memory) for i in range(2)), Link(1e12, 1e-9)) for h in range(2))
    return Cluster("hosts", hosts, Link(bandwidth, 1e-9))


CONFIG = {"pipeline.schedule": "interleaved", "pipeline.num_stages": 2, "pipeline.num_chunks": 2, "pipeline.num_micro_batch": 16}


def test_the_slower_the_network_the_larger_the_group() -> None:
    sizes = []
    for bandwidth in (1e12, 1e8, 3e7, 1e6):
        plan = make_plan(chain(8, width=128), two_hosts(bandwidth), Config(CONFIG), rows=64)
        sizes.append(plan.pipelines[0].group_size)
        choice = next(choice for choice in plan.choices if choice.subject == "group size")
        assert choice.decision == f"{plan.pipelines[0].group_size} micro-batches per chunk in turn" and "exposed" in choice.cost
    assert sizes == sorted(sizes, key=lambda size: size or 0) and sizes[0] == 2 and sizes[-1] == 16


def test_memory_bounds_the_group() -> None:
    config = Config(CONFIG)
    free = make_plan(chain(8, width=128), two_hosts(1e6), config, rows=4096)
    by_device: dict[str, int] = {}
    for stage in free.replicas[0].stages:
        for name, found in zip(stage.virtual_device.devices, stage.estimates, strict=True):
            by_device[name] = by_device.get(name, 0) + found.parameter_bytes + found.activation_bytes
    plan = make_plan(chain(8, width=128), two_hosts(1e6, memory=max(by_device.values())), config, rows=4096)
    assert plan.pipelines[0].group_size is not None and plan.pipelines[0].group_size < 16
    choice = next(choice for choice in plan.choices if choice.subject == "group size")
    assert choice.bound == "memory" and "out of memory" in choice.runner_up


def test_a_given_size_is_kept() -> None:
    plan = make_plan(chain(8, width=128), two_hosts(1e6), Config({**CONFIG, "pipeline.group_size": 4}), rows=64)
    assert plan.pipelines[0].group_size == 4
    assert (
        make_plan(chain(8, width=128), two_hosts(1e6), Config({**CONFIG, "pipeline.schedule": "aiao"}), rows=64).pipelines[0].group_size
        is None
    )
