"""What copies of the state take by the estimate: bytes of hosts, seconds of the busiest link; and what faults cost with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.errors import PlanError
from whale.estimate import Costs, Faults, StepEstimate, estimate, with_copies
from whale.ir.cluster import Cluster
from whale.planning import make_plan

STAGES = {"planning.search": "off", "pipeline.num_stages": 2, "memory.redundancy": 1}
LAYER_BYTES = 3 * 4 * 64 * 64
"""Weight and two tensors of Adam's."""


def estimated(hosts: Cluster, **settings: object) -> StepEstimate:
    graph, config = chain(4, width=64), Config({**STAGES, **settings})
    return estimate(make_plan(graph, hosts, config, rows=8), graph, hosts, Costs.of(config))


def test_a_stage_without_replica_is_sent_to_the_other_host() -> None:
    hosts = cluster((1e9,), (1e9,))
    found = estimated(hosts).redundancy
    assert found is not None and dict(found.host_bytes) == dict.fromkeys(("h0", "h1"), 2 * (2 + 2) * LAYER_BYTES)
    link = hosts.link("h0/0", "h1/0")
    assert found.survives == "host" and found.link.endswith(("out", "in")) and found.sent_bytes == ("h0/0", 2 * LAYER_BYTES)
    assert found.seconds == pytest.approx(link.seconds(2 * LAYER_BYTES) + 2 * 2 * LAYER_BYTES / 5e11)
    assert "survives the loss of any one host: copies after each step take" in str(found)


def test_a_card_is_shared_and_replicas_on_two_hosts_send_nothing() -> None:
    hosts = cluster((1e9, 1e9), (1e9, 1e9))
    carded = replace(hosts, hosts=tuple(replace(host, card=1e8) for host in hosts.hosts))
    config = {"cluster.device_place_prefer_intra_node": True}
    apart = estimated(carded, **config).redundancy
    assert apart is not None
    if apart.link:
        assert "card" in apart.link
    alone = estimated(cluster((1e9, 1e9))).redundancy
    assert alone is not None and alone.survives == "device" and "each 3 steps" in str(replace(alone, every=3))
    assert estimated(hosts, **{"memory.redundancy": 0}).redundancy is None
    whole = estimated(hosts, **{"pipeline.num_stages": None}).redundancy
    assert whole is not None and whole.link == "" and "nothing is sent" in str(whole)
    assert sum(num_bytes for _, num_bytes in whole.host_bytes) == 2 * 2 * 4 * LAYER_BYTES


def test_hosts_have_room_for_copies() -> None:
    small = cluster((1e9,), (1e9,))
    small = replace(small, hosts=tuple(replace(host, memory=LAYER_BYTES) for host in small.hosts))
    with pytest.raises(PlanError, match=r"out of memory on host h0: the plan needs 384.00 KiB, 48.00 KiB usable"):
        make_plan(chain(4, width=64), small, Config(STAGES), rows=8)


def test_a_fault_repeats_no_more_than_the_steps_since_the_copies() -> None:
    step = estimated(cluster((1e9,), (1e9,)))
    faults = Faults(1e4, 5.0, 60.0)
    found, best = with_copies(faults, step), faults.goodput(faults.best_interval(least=step.step_seconds))
    assert found is not None and found.repeated < best.repeated and found.interval_seconds == step.step_seconds
    assert with_copies(faults, replace(step, redundancy=None)) is None
