"""Collectives: which way is the fastest, and that the simulation of one alone is its closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.graphs import chain, device
from whale.config import Config
from whale.estimate import Costs, Line, all_gather_line, all_reduce_line, all_reduce_seconds, all_to_all_line, estimate
from whale.estimate.costs.communication import fabric, fastest_way
from whale.ir.cluster import Cluster, Host, Link
from whale.planning import make_plan


def hosts(num_hosts: int, on_host: int, inner: Link, network: Link, card: float | None = None) -> Cluster:
    found = tuple(Host(f"h{h}", tuple(device(f"h{h}/{i}", f"h{h}", 1e9) for i in range(on_host)), inner, card) for h in range(num_hosts))
    return Cluster("hosts", found, network)


def names(there: Cluster) -> list[str]:
    return [each.name for each in there.devices]


def test_a_group_uses_all_ways_out_of_a_host_up_to_its_card() -> None:
    inner, network = Link(100e9, 0.0), Link(10e9, 0.0)
    alone, capped = hosts(2, 4, inner, network), hosts(2, 4, inner, network, card=20e9)
    assert fabric(alone, names(alone)).between == 40e9
    assert fabric(capped, names(capped)).between == 20e9
    assert fabric(capped, ("h0/0", "h1/0")).between == 5e9, "the others talk as well"


def test_small_sums_go_by_a_tree_and_large_ones_by_rings() -> None:
    there = hosts(1, 16, Link(1e9, 1e-5), Link(1e9, 1e-5))
    small, large = all_reduce_seconds(there, names(there), 8.0), all_reduce_seconds(there, names(there), 1e9)
    assert small == pytest.approx(2 * 4 * 1e-5, rel=1e-3)
    assert large == pytest.approx(2 * 15 / 16 + 2 * 15 * 1e-5)


def test_sums_of_cpus_go_around_a_ring_and_cross_between_hosts_more() -> None:
    there = hosts(2, 2, Link(100e9, 1e-5), Link(1e9, 1e-5), card=1e9)
    cores = replace(
        there, hosts=tuple(replace(own, devices=tuple(replace(each, model="cpu") for each in own.devices)) for own in there.hosts)
    )
    assert all_reduce_seconds(there, names(there), 1e9) == pytest.approx(2 * 1 / 2, rel=1e-3)
    assert all_reduce_seconds(cores, names(cores), 1e9) == pytest.approx(2 * 3 / 4, rel=1e-3)


def test_devices_of_a_host_share_its_bus() -> None:
    own, bus = (hosts(1, 4, Link(1e9, 0.0, shared), Link(1e9, 0.0)) for shared in (False, True))
    assert all_reduce_seconds(bus, names(bus), 1e6) == pytest.approx(4 * all_reduce_seconds(own, names(own), 1e6))


def test_what_leaves_a_host_is_told_from_what_stays() -> None:
    there = hosts(2, 2, Link(100e9, 0.0), Link(1e9, 0.0))
    gather = all_gather_line(there, names(there), Line(4e9), 1, 1.0).fixed
    assert gather == pytest.approx(4e9 * 0.5 / 2e9), "half of all crosses, by two rails"
    exchange = all_to_all_line(there, names(there), Line(4e9), 1, 1.0).fixed
    assert exchange == pytest.approx(2 * 0.25e9 / 1e9 + 0.25e9 / 100e9)
    assert all_to_all_line(there, names(there)[:1], Line(4e9), 1, 1.0) == Line()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10), st.booleans(), st.booleans())
def test_a_sum_that_is_simulated_alone_takes_its_closed_form(
    num_hosts: int, on_host: int, scale: int, shared: bool, has_card: bool
) -> None:
    there = hosts(num_hosts, on_host, Link(3e6, 1e-5, shared), Link(1e6, 5e-5), 2e6 if has_card else None)
    graph = chain(1, width=2 + 8 * scale)
    plan = make_plan(graph, there, Config({}), rows=16)
    found = estimate(plan, graph, there, Costs(bucket_bytes=2**30))
    syncs = found.devices[0].syncs
    num_bytes = sum(sync.num_bytes for sync in syncs)
    assert len(syncs) == (num_hosts * on_host > 1)
    if syncs:
        assert syncs[0].end - syncs[0].start == pytest.approx(all_reduce_seconds(there, names(there), num_bytes))


@given(st.integers(2, 9), st.integers(1, 4), st.floats(1, 1e9))
def test_a_faster_way_is_never_passed_over(on_host: int, num_hosts: int, num_bytes: float) -> None:
    there = hosts(num_hosts, on_host, Link(1e9, 1e-5), Link(1e8, 1e-4))
    over = fabric(there, names(there))
    best = fastest_way(over, 2, num_bytes)
    ring = 2 * (over.num_devices - 1) / over.num_devices * num_bytes / min(over.inside, over.between)
    assert num_bytes * best.seconds_per_byte(over) + best.latency <= ring + 2 * over.num_devices * 1e-4 + 1e-9
    line = all_reduce_line(there, names(there), Line(0.0, num_bytes), 1, 1.0)
    assert line.at(1.0) == pytest.approx(num_bytes * best.seconds_per_byte(over) + best.latency)
