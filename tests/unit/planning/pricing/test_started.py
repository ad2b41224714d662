"""Where the host that starts kernels rules, what the planner balances by is what the estimate says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.planning.graphs import chain, cluster, scope
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.part import NOTHING, Part
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.plan import Estimate
from whale.planning import make_plan
from whale.planning.annotations.taskgraphs import assign_by_scopes, read_scopes
from whale.planning.pipeline.scheduling import shape_pipeline
from whale.planning.pricing import DeviceCost, cost_alone
from whale.planning.shard.stage_price import StagePricing


def started_by(host_seconds: float, num_devices: int = 1, latency: float = 1e-9, speeds: tuple[float, ...] = ()) -> Cluster:
    """Devices of one host, which needs so long to start a kernel; messages between them take so long at least."""
    there = cluster(speeds or (1e9,) * num_devices)
    host = there.hosts[0]
    devices = tuple(replace(own, host_seconds=host_seconds) for own in host.devices)
    return replace(there, hosts=(replace(host, devices=devices, link=replace(host.link, latency=latency)),))


SPLIT = chain(4, [(scope(0, 2, kind="split"),)] * 4, width=64)
"""One stage over two devices."""


def split_stage(there: Cluster, message_seconds: float) -> tuple[DeviceCost, Estimate]:
    """The stage as the planner prices it, and as the estimate does."""
    config = Config({"estimate.message_seconds": message_seconds, "communication.overlap": False})
    annotations = read_scopes(SPLIT, config, 2)
    assert annotations is not None
    assignment = assign_by_scopes(SPLIT, annotations)
    pipeline = shape_pipeline(config, annotations, 2)
    prices = Prices(SPLIT, there, Costs.of(config))
    priced = StagePricing.of(prices, overlap=False).price(pipeline, assignment, 0, (("h0/0", "h0/1"),), 8, (NOTHING,))
    stage = make_plan(SPLIT, there, config, rows=8).replicas[0].stages[0]
    assert stage.shards == priced.shards, "both are of one plan"
    return priced.costs[0], stage.estimates[0]


@pytest.mark.parametrize("latency", [1e-9, 1e-2])
@pytest.mark.parametrize("host_seconds", [0.0, 1e-4, 1.0])
def test_messages_inside_a_split_group_pass_while_the_host_starts_kernels(host_seconds: float, latency: float) -> None:
    found = split_stage(started_by(host_seconds, 2, latency), 0.0)[1]
    kernels = split_stage(started_by(0.0, 2, latency), 0.0)[1]
    host = split_stage(started_by(host_seconds, 2, 0.0), 0.0)[1]
    assert found.forward == pytest.approx(max(kernels.forward, host.forward))
    assert max(kernels.backward, host.backward) <= found.backward * (1 + 1e-9)
    if host_seconds == 1.0:
        assert found.backward == pytest.approx(host.backward)


@pytest.mark.parametrize("message_seconds", [0.0, 1e-3])
@pytest.mark.parametrize("host_seconds", [0.0, 1e-4, 1.0])
def test_a_split_stage_takes_what_the_estimate_says(host_seconds: float, message_seconds: float) -> None:
    cost, expected = split_stage(started_by(host_seconds, 2, 1e-4), message_seconds)
    rows = np.array([8.0])
    assert cost.forward.device.at(8) + cost.forward.waiting(rows)[0] == pytest.approx(expected.forward)
    seconds = cost.seconds.at(8) + cost.waiting(rows)[0]
    assert seconds <= (expected.forward + expected.backward) * (1 + 1e-6), "I and W may wait for the host one by one"
    if host_seconds != 1e-4:
        assert seconds == pytest.approx(expected.forward + expected.backward)


@pytest.mark.parametrize(("host_seconds", "waits"), [(0.0, False), (1e-9, False), (1.0, True)])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_stage_takes_what_the_estimate_says(host_seconds: float, waits: bool, rows: int) -> None:
    graph, there = chain(7, width=16), started_by(host_seconds)
    prices = Prices(graph, there, Costs())
    stage = make_plan(graph, there, Config(), rows=rows).replicas[0].stages[0]
    cost = cost_alone(prices, Part(stage.ops, stage.parameters, ()), "h0/0", rows)
    waiting = float(cost.waiting(np.array([float(rows)]))[0])
    expected = stage.estimates[0]
    assert cost.seconds.at(rows) + waiting == pytest.approx(expected.forward + expected.backward)
    assert (waiting > 0) == waits


def test_waiting_ends_where_the_kernels_take_longer() -> None:
    graph, there = chain(7, width=16), started_by(1e-4)
    stage = make_plan(graph, there, Config(), rows=64).replicas[0].stages[0]
    cost = cost_alone(Prices(graph, there, Costs()), Part(stage.ops, stage.parameters, ()), "h0/0", 64)
    rows = np.arange(0.0, 1e6, 1e4)
    waiting = cost.waiting(rows)
    seconds = np.array([cost.seconds.at(count) for count in rows]) + waiting
    assert waiting[0] > 0 and waiting[-1] == 0
    assert (np.diff(waiting) <= 0).all() and (np.diff(seconds) >= 0).all()


def test_devices_that_all_wait_for_the_host_take_rows_by_their_speed() -> None:
    there = started_by(1e-2, speeds=(1e9, 5e8, 5e8))
    plan = make_plan(chain(8, width=64), there, Config({"planning.search": "off"}), rows=16)
    assert [replica.share for replica in plan.replicas] == [8, 4, 4], "though any division takes as long"
