"""The law for plans that a search chose: with replicas, pipelines or idle ranks, as the devices have it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from tests import reference
from tests.distributed.training import Case, largest_of, run_case, train_rank_and_plan, train_reference
from tests.distributed.world import World
from tests.models import Block, Description, Segment
from whale.ir.plan import Plan

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
    assert plan.choices[0].decision.startswith("as it is divided")
    assert len(plan.devices) == num_used and plan.pipelines[0].num_ranks == 2 and plan.pipelines[0].num_micro_batch > 1
    check(runs, case)


def test_only_the_devices_that_are_named_train(world: World) -> None:
    case = Case(MODEL, (12, 7), (0.002, 0.002, 0.001), (*EFFORT, ("cluster.devices", "host0/0,host0/2")))
    runs = run_case(world, searched, case)
    assert runs[0][1].devices == ("host0/0", "host0/2") and runs[0][1].idle_devices == ()
    check(runs, case)
