"""Where the host that starts kernels rules, what the planner balances by is what the estimate says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.planning import make_plan
from whale.planning.pricing.stage_costs import cost_alone


def started_by(host_seconds: float) -> Cluster:
    """One device, with a host that needs so long to start a kernel."""
    there = cluster((1e9,))
    host = there.hosts[0]
    return replace(there, hosts=(replace(host, devices=(replace(host.devices[0], host_seconds=host_seconds),)),))


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
