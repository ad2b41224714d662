"""What every order says of itself: its closed form against its execution, and what the search takes from it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from whale.config import SCHEDULES
from whale.estimate import ActionTimes, simulate
from whale.ir.schedule import Kind
from whale.schedules import BUILDERS, build
from whale.schedules.idle import RankPasses, before
from whale.search.freedom import ORDERS

NUM_CASES = 80
MEAN, WORST = 0.03, 0.25  # shares of the step by which the closed form may be off


def test_every_order_can_be_set_and_the_search_tries_what_its_builder_says() -> None:
    assert set(BUILDERS) == set(SCHEDULES)
    assert {(order.schedule, order.num_chunks) for order in ORDERS} == {(each.name, v) for each in BUILDERS.values() for v in each.tried}
    recomputing = {"recompute_early", "last_no_recompute", "shifted_critical_path"}
    assert {name for name, each in BUILDERS.items() if each.recomputes} == recomputing
    assert {name for name, each in BUILDERS.items() if each.delays_weights} == {"zb_h1", "zb_h2", "zb_v"}


@pytest.mark.parametrize("name", BUILDERS)
def test_the_closed_form_of_an_order_is_near_its_execution(name: str) -> None:
    """Few and many micro-batches, unlike ranks, slow messages."""
    drawn = random.Random(name)
    errors = [abs(_error(name, drawn)) for _ in range(NUM_CASES)]
    assert np.mean(errors) < MEAN and max(errors) < WORST


def _error(name: str, drawn: random.Random) -> float:
    builder = BUILDERS[name]
    p, m, v = drawn.randint(2, 8), drawn.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32]), builder.chunks or drawn.choice([2, 3, 4])
    spread, weights, hop = drawn.choice([0.0, 0.1, 0.5]), drawn.uniform(0.3, 0.6), drawn.choice([0.0, 0.05, 0.3])
    order = build(name, num_ranks=p, num_micro_batch=m, num_chunks=v)
    kinds = [{action.kind for action in actions} for actions in order.ranks]
    rank = np.array([[1 + spread * drawn.random()] for _ in range(p)])
    recomputed = rank * [[Kind.RECOMPUTE in own] for own in kinds]
    alive = np.ceil(np.array(order.peak_in_flight)[:, None] / v)
    hops = np.full_like(rank, hop)
    if v == 1 or order.stage_rank[p] != 0:  # the last rank sends nothing to the first
        hops[-1] = 0.0
    passes = RankPasses(rank, 2 * rank + recomputed, 2 * rank * weights, m, v, recomputed, hops, alive)
    of_stage, late = [float(rank[owner, 0]) / v for owner in order.stage_rank], weights if Kind.BACKWARD_WEIGHT in kinds[0] else 0.0
    inputs, after = ([2 * share * own for own in of_stage] for share in (1 - late, late))
    expected = simulate(order, ActionTimes(of_stage, inputs, after, recompute=of_stage, transfer=hop)).makespan
    return float((m * passes.own + builder.idle(passes)).max()) / expected - 1


def test_the_ranks_before_each() -> None:
    assert before(np.array([[1.0], [2.0], [4.0]]))[:, 0].tolist() == [0.0, 1.0, 3.0]
