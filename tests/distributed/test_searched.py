"""The law for plans that a search chose: with replicas, pipelines or idle ranks, as the devices have it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from tests import reference
from tests.distributed.training import (
    Case,
    captured_case,
    largest_of,
    make_cluster,
    make_engine,
    run_case,
    train_rank_and_plan,
    train_reference,
    trained,
)
from tests.distributed.world import World
from tests.models import Block, Description, Segment
from tests.unit.search.exhaustive import replica_of
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Plan
from whale.planning.realizing import Realizer
from whale.planning.strategy import Placed, Strategy
from whale.search.freedom import Order

MODEL = Description(tokens=True, blocks=(Block("feed_forward"), Block("attention"), Block("linear", skip_from=1), Block("gelu")))
EFFORT = (("planning.effort", 30),)


def searched(rank: int, num_ranks: int, case: Case) -> tuple[reference.Run, Plan]:
    with mock.patch.dict(os.environ, {"WHALE_PLANNING_SEARCH": "auto"}):
        return train_rank_and_plan(rank, num_ranks, case)


def check(runs: Sequence[tuple[reference.Run, Plan]], case: Case) -> None:
    """Losses of two steps, and the weights after them; of gradients a rank has its part where the search split a layer."""
    own = [replace(run, gradients={}) for run, _ in runs]
    error, where = largest_of(own, replace(train_reference(case), gradients={}))
    assert error < 1e-10, where


@pytest.mark.parametrize(
    ("speeds", "num_used"),
    [((0.002, 0.003, 0.002), 3), ((0.001, 1e-7), 1), ((0.002, 0.001), 2)],
    ids=["three", "one far too slow", "two"],
)
def test_law(world: World, speeds: tuple[float, ...], num_used: int) -> None:
    case = Case(MODEL, (12, 7), speeds, EFFORT)
    runs = run_case(world, searched, case)
    assert runs[0][1].choices[0].pass_name == "search"
    assert len(runs[0][1].devices) == num_used
    check(runs, case)


SCOPED = replace(MODEL, segments=(Segment(0), Segment(2)), placement="construction")


@pytest.mark.parametrize(("speeds", "num_used"), [((0.002, 0.001), 2), ((0.002, 1e-7, 0.002), 2)], ids=["two", "one far too slow"])
def test_law_around_scopes(world: World, speeds: tuple[float, ...], num_used: int) -> None:
    case = Case(SCOPED, (12, 12), speeds, EFFORT)
    runs = run_case(world, searched, case)
    plan = runs[0][1]
    assert plan.choices[0].decision.startswith("divided as given")
    assert len(plan.devices) == num_used and plan.pipelines[0].num_ranks == 2 and plan.pipelines[0].num_micro_batch > 1
    check(runs, case)


def seated(rank: int, num_ranks: int, case: Case, order: Order, placed: Placed) -> reference.Run:
    """Trains by the plan for a replica on these devices of each rank."""
    made, cluster, config = captured_case(case), make_cluster(case.speeds), Config(dict(case.config))
    graph = made.capture()[0]
    seater = Realizer(Prices(graph, cluster, Costs.for_model(config, graph, cluster)), config, case.rows[0])
    plan, _ = seater.realize(Strategy((replica_of(placed, cluster, order, 2),))).finished()
    assert [len(stage.virtual_device.devices) for stage in plan.replicas[0].stages[:2]] == [len(names) for names in placed]
    return trained(make_engine(case, plan), case)


FIRST, PAIR, LAST = ("host0/0",), ("host0/0", "host0/1"), ("host0/2",)


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "placed"),
    [("1f1b", 1, (PAIR, LAST)), ("zb_h2", 1, (FIRST, ("host0/1", "host0/2"))), ("interleaved", 2, (PAIR, LAST))],
)
def test_law_of_ranks_that_are_split_over_unlike_numbers_of_devices(world: World, schedule: str, num_chunks: int, placed: Placed) -> None:
    case = Case(MODEL, (8, 7), (0.002, 0.002, 0.002))
    runs = run_case(world, seated, case, Order(schedule, num_chunks), placed)
    error, where = largest_of([replace(run, gradients={}) for run in runs], replace(train_reference(case), gradients={}))
    assert error < 1e-10, where


def test_only_the_devices_that_are_named_train(world: World) -> None:
    case = Case(MODEL, (12, 7), (0.002, 0.002, 0.001), (*EFFORT, ("cluster.devices", "host0/0,host0/2")))
    runs = run_case(world, searched, case)
    assert sorted(runs[0][1].devices) == ["host0/0", "host0/2"] and runs[0][1].idle_devices == ()
    check(runs, case)
