"""Prices stay as they are; what planning varies is a budget beside them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from tests.unit.planning.graphs import chain, cluster
from tests.unit.search.exhaustive import recomputing, replica_of, seater_of
from whale.config import Config
from whale.errors import WhaleError
from whale.estimate import Costs
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.planning.realizing import Realizer
from whale.planning.strategy import Strategy
from whale.search.freedom import ORDERS

WIDTH, NUM_LAYERS, ROWS = 64, 8, 64
WEIGHTS = NUM_LAYERS * WIDTH * WIDTH * 4
SHARDED = Config({"memory.zero": "3", "memory.fraction": 1.0})


def test_prices_of_one_budget_are_not_those_of_another() -> None:
    graph = chain(NUM_LAYERS, width=WIDTH)
    prices = Prices(graph, cluster((1e9,) * 4), Costs.of(SHARDED))
    part = Part(tuple(op.name for op in graph.ops if op.kind == "call"), tuple(each.name for each in graph.parameters), ())
    budgets = Budget(num_keepers=1), Budget(num_keepers=4), ALL
    one, four, every = (prices.part(part, 1.0, budget=own).parameter_bytes for own in budgets)
    assert one > four == every
    assert [prices.part(part, 1.0, budget=own).parameter_bytes for own in reversed(budgets)] == [every, four, one]
    readonly: Any = prices
    with pytest.raises(FrozenInstanceError):
        readonly.cluster = cluster((1e9,))


def test_bytes_that_are_reserved_add_up() -> None:
    prices = Prices(chain(1), cluster((1e9,)), Costs())
    kind = prices.cluster.devices[0].kind
    less = ALL.reserving({kind: 30}).reserving({kind: 12})
    assert prices.capacity("h0/0") - prices.capacity("h0/0", less) == 42
    assert less.reserving({kind: -42}) == ALL.reserving({kind: 0}) == ALL


def test_where_a_model_may_be_cut_does_not_depend_on_what_was_planned_before() -> None:
    """One pipeline of all devices has one keeper of each stage; the prices of the cuts are those of the cluster."""

    def solved(realizer: Realizer) -> np.ndarray[Any, Any]:
        points = realizer.solver(pipeline, "auto").points
        assert points is not None
        return points.held.parameters

    graph, tight = chain(NUM_LAYERS, width=WIDTH), cluster((1e9,) * 4, memory=round(1.1 * WEIGHTS))
    known, new = (seater_of(graph, tight, SHARDED, ROWS) for _ in range(2))
    pipeline = replica_of(tuple((device.name,) for device in tight.devices), tight, ORDERS[0], 4)
    with suppress(WhaleError):
        known.realize(recomputing(Strategy((pipeline,)), "auto"))
    assert np.array_equal(solved(known), solved(new))
