"""What is found is at least as good as by the rules of others, and on the clusters where placement by rule leaves most."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest

from tests.unit.search.exhaustive import replica_of, seater_of
from whale.config import Config
from whale.errors import WhaleError
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster
from whale.planning.strategy import Strategy
from whale.search import search
from whale.search.freedom import ORDERS, freedom_of
from whale.search.space import micro_batch_counts, powers_of_two
from whale.workloads import GPT

GRAPH = GPT(layers=4, hidden=256, heads=4, sequence=128, vocabulary=1000).graph()
MIXED = (
    "[{name: v, devices: 2 x V100-32GB}, {name: t, devices: 2 x T4}]",
    "[{name: a, devices: 1 x A100-80GB}, {name: v, devices: 1 x V100-32GB}, {name: t, devices: 2 x T4}]",
)


def hosts(text: str, network: str = "ethernet-25g") -> Cluster:
    return parse_cluster(f"hosts: {text}\nnetwork: {network}")


@pytest.mark.slow
@pytest.mark.parametrize("text", MIXED)
def test_four_stages_stand_in_the_best_order(text: str) -> None:
    cluster = hosts(text)
    settings = {"pipeline.num_stages": 4, "pipeline.num_micro_batch": 8, "pipeline.schedule": "1f1b"}
    seater = seater_of(GRAPH, cluster, freedom_of(Config(settings), mixes_samples=False).config, 32)
    every = permutations(device.name for device in cluster.devices)
    strategies = (Strategy((replica_of(tuple((name,) for name in names), cluster, ORDERS[0], 8),)) for names in every)
    best = min(seater.realize(strategy).plan.step_seconds for strategy in strategies)
    found = search(GRAPH, cluster, Config(settings), rows=32, effort=1000)
    assert found.plan.step_seconds == pytest.approx(best)


def test_slow_devices_on_a_slow_network_are_left_out() -> None:
    cluster = hosts("[{name: new, devices: 8 x A100-80GB}, {name: old, devices: 8 x T4}]", "ethernet-10g")
    found = search(GRAPH, cluster, Config({"planning.effort": 20}), rows=128)
    assert {cluster.by_name[name].model for name in found.plan.devices} == {"A100-80GB"}


def takeaways(cluster: Cluster, num_rows: int) -> Iterator[Strategy]:
    """Megatron's: splits inside hosts, pipelines over hosts, as few devices for a replica as hold it; the best of all micro-batches."""
    names = [device.name for device in cluster.devices]
    for size in powers_of_two(len(names)):
        width = min(size, len(cluster.hosts[0].devices))
        replicas = [names[start : start + size] for start in range(0, len(names), size)]
        placed = [tuple(tuple(own[start : start + width]) for start in range(0, size, width)) for own in replicas]
        for num_micro_batch in micro_batch_counts(num_rows, num_rows // len(placed)):
            yield Strategy(tuple(replica_of(own, cluster, ORDERS[0], num_micro_batch) for own in placed))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["32 GiB", "60 MiB"])
def test_no_slower_than_by_the_takeaways(memory: str) -> None:
    cluster = hosts(f"[{{name: a, count: 2, devices: {{model: V100-32GB, count: 4, memory: {memory}}}}}]")
    config = Config({"estimate.communicator_bytes": 0})  # which take more than 60 MiB
    seater = seater_of(GRAPH, cluster, freedom_of(config, mixes_samples=False).config, 32)
    seconds: dict[int, float] = {}
    for strategy in takeaways(cluster, 32):
        size = strategy.num_devices // strategy.num_replicas
        if not any(smaller < size for smaller in seconds):  # the fewest devices that hold it
            try:
                step = seater.realize(strategy).plan.step_seconds
            except WhaleError:
                continue
            seconds[size] = min(step, seconds.get(size, step))
    found = search(GRAPH, cluster, config, rows=32)
    assert seconds, "some of them fit"
    assert found.plan.step_seconds <= min(seconds.values()) * (1 + 1e-9)
