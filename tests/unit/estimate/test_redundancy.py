"""What copies of the state take by the estimate: bytes of hosts, seconds of the busiest link; and what faults cost with them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.errors import PlanError
from whale.estimate import Costs, Faults, StepEstimate, estimate, with_copies
from whale.ir.cluster import Cluster, Link
from whale.planning import make_plan
from whale.planning.explain.choices import explain_step
from whale.search import search
from whale.units import format_seconds

STAGES = {"planning.search": "off", "pipeline.num_stages": 2, "memory.redundancy": 1}
LAYER_BYTES = 3 * 4 * 64 * 64
"""Weight and two tensors of Adam's."""


def estimated(hosts: Cluster, **settings: object) -> StepEstimate:
    graph, config = chain(4, width=64), Config({**STAGES, **settings})
    return estimate(make_plan(graph, hosts, config, rows=8), graph, hosts, Costs.of(config))


def test_a_stage_without_replica_is_sent_to_the_other_host() -> None:
    hosts = cluster((1e9,), (1e9,))
    found = estimated(hosts).redundancy
    assert found is not None and found.host_bytes == tuple((host, 8 * LAYER_BYTES, 10 * LAYER_BYTES) for host in ("h0", "h1"))
    link = hosts.link("h0/0", "h1/0")
    assert found.survives == "host" and found.link.endswith(("out", "in")) and found.sent_bytes == ("h0/0", 2 * LAYER_BYTES)
    assert found.seconds == pytest.approx(link.seconds(2 * LAYER_BYTES) + 2 * 2 * LAYER_BYTES / 5e11)
    assert "survives the loss of any one host: copies after each step take" in str(found)
    plain = estimated(hosts, **{"memory.redundancy": 0})
    for every in (1, 4):
        step = estimated(hosts, **{"memory.redundancy_steps": every})
        assert step.step_seconds == pytest.approx(plain.step_seconds + found.seconds / every)
        assert step.training_seconds == pytest.approx(plain.step_seconds) and step.idle(step.straggler) == plain.idle(plain.straggler)


def test_the_search_weighs_copies() -> None:
    """Over a slow network a pipeline across hosts takes least, but each host then has what no other has."""
    graph, hosts = chain(8, width=64), replace(cluster((1e10, 1e10), (1e10, 1e10)), network=Link(1e8, 1e-5))
    found = [search(graph, hosts, Config({"memory.redundancy": number}), rows=64, effort=8) for number in (0, 1)]
    plain, copied = (each.step.redundancy for each in found)
    assert plain is None and copied is not None and found[0].strategy != found[1].strategy
    there = estimate(found[0].plan, graph, hosts, Costs.of(Config({"memory.redundancy": 1})))
    assert there.redundancy is not None and there.redundancy.link and not copied.link
    assert found[0].step.step_seconds == there.training_seconds < found[1].step.training_seconds
    assert found[1].value == found[1].step.step_seconds < 0.9 * there.step_seconds


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
    assert sum(num_bytes for _, num_bytes, _ in whole.host_bytes) == 2 * 2 * 4 * LAYER_BYTES


def test_hosts_have_room_for_copies() -> None:
    small = cluster((1e9,), (1e9,))
    small = replace(small, hosts=tuple(replace(host, memory=LAYER_BYTES) for host in small.hosts))
    says = "needs 864.00 KiB (copies of the state: 384.00 KiB; what is left of it at a fault: 480.00 KiB), 48.00 KiB usable"
    with pytest.raises(PlanError, match=re.escape(f"out of memory on host h0: the plan {says}")):
        make_plan(chain(4, width=64), small, Config(STAGES), rows=8)


def test_a_fault_repeats_no_more_than_the_steps_since_the_copies() -> None:
    step = estimated(cluster((1e9,), (1e9,)))
    faults = Faults(1e4, 5.0, 60.0)
    found, best = with_copies(faults, step), faults.goodput(faults.best_interval(least=step.step_seconds))
    assert found is not None and found.repeated < best.repeated and found.interval_seconds == step.step_seconds
    assert with_copies(faults, replace(step, redundancy=None)) is None
    assert step.redundancy is not None, "copies take time from the steps that count"
    share = step.redundancy.step_seconds / step.step_seconds
    assert share > 0 and found.saving == pytest.approx(share * (found.useful + found.saving))
    assert found.useful + found.saving + found.repeated + found.restarting == pytest.approx(1.0)


def test_what_a_step_is_made_of_names_copies() -> None:
    step = estimated(cluster((1e9,), (1e9,)), **{"memory.redundancy_steps": 4})
    assert step.redundancy is not None
    copies = f", {format_seconds(step.redundancy.step_seconds)} of copies"
    assert str(step).splitlines()[0].endswith(copies) and (next(explain_step(step)).cost or "").endswith(copies)
    assert "of copies" not in str(replace(step, redundancy=None))
