"""Whether another plan pays at the speeds that were measured: pure values in, a decision out."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.examples import slow
from tests.unit.planning.graphs import chain, cluster, scope
from whale.api.adapting import EVERY, Adapting
from whale.config import Config
from whale.estimate import Costs, estimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.health import WINDOW, Busy
from whale.ir.plan import Plan
from whale.search import decide
from whale.search.rebalancing import LEAST_GAIN, PlanMove, best_move

THERE = cluster((1e9, 1e9))
ROWS = Config({"planning.search": "off"})
PIPELINE = Config({"planning.search": "off", "pipeline.num_stages": 2, "pipeline.num_micro_batch": 4})
GRAPH = chain(12, width=128)


def at_work(config: Config = ROWS, there: Cluster = THERE, graph: ModelGraph = GRAPH) -> Plan:
    return decide(None, graph, there, config, rows=64)[0]


def stages(plan: Plan) -> list[int]:
    return [len(stage.ops) for stage in plan.replicas[0].stages]


def test_rows_follow_the_speeds_and_come_back() -> None:
    plan = at_work()
    assert plan.replica_rows(64) == ((0, 32), (32, 64))
    move = best_move(plan, GRAPH, THERE, ROWS, {"h0/1": 3.0})
    assert move.pays and move.plan.replica_rows(64) == ((0, 48), (48, 64)), str(move)
    assert move.gain == pytest.approx(0.5, abs=0.05) and move.move_seconds < move.stay_seconds
    back = best_move(move.plan, GRAPH, move.cluster, ROWS, {"h0/1": 1.0})
    assert back.pays and back.plan.replicas == plan.replicas and back.cluster == THERE


def test_cuts_follow_the_speeds_and_what_was_set_stays() -> None:
    plan = at_work(PIPELINE)
    move = best_move(plan, GRAPH, THERE, PIPELINE, {"h0/0": 2.0})
    first, second = stages(move.plan)
    assert move.pays and first < second and move.plan.pipelines[0].num_micro_batch == 4


def test_a_plan_that_was_given_keeps_its_strategy() -> None:
    config = Config()
    plan = at_work(PIPELINE)
    for given in (plan, Path("plan.json")):
        move = best_move(plan, GRAPH, THERE, config, {"h0/0": 3.0}, given=given)
        assert move.pays and move.plan.pipelines == plan.pipelines and move.plan.devices == plan.devices
        assert stages(move.plan) != stages(plan)


def test_scopes_stay() -> None:
    graph = chain(12, [(scope(0, name="front"),)] * 6 + [(scope(1, name="back"),)] * 6, width=128)
    plan = at_work(Config({"pipeline.num_micro_batch": 4}), cluster((1e9,) * 4), graph)
    move = best_move(plan, graph, cluster((1e9,) * 4), Config({"pipeline.num_micro_batch": 4}), {"h0/3": 4.0})
    assert {graph.name for graph in move.plan.task_graphs} == {"front", "back"} and move.gain > 0


def test_what_does_not_pay_says_why() -> None:
    plan = at_work()
    small = best_move(plan, GRAPH, THERE, ROWS, {"h0/1": 1.05})
    assert not small.pays and "at least 5%" in small.against
    dear = best_move(plan, GRAPH, THERE, ROWS.with_values({"runtime.rebalance_horizon": 10.0}), {"h0/1": 3.0}, overhead=30.0)
    assert not dear.pays and dear.gain > LEAST_GAIN and "within 10 s" in dear.against and dear.cost_seconds > 30
    assert best_move(plan, GRAPH, THERE, ROWS, {}).gain == 0.0


class Run:
    """500 steps or more of a run whose devices are as slow as they are said to be, with what is done about it."""

    def __init__(self, seed: int, spread: float, there: Cluster = THERE) -> None:
        self.noise, self.spread, self.now = random.Random(seed), spread, 0.0
        self.cluster, self.moves, self.said = there, list[tuple[int, PlanMove]](), list[str]()
        self.plan = at_work(there=there)
        self.adapting = Adapting(True, tell=self.said.append, clock=lambda: self.now)
        self._take_up()

    def _take_up(self) -> None:
        step = estimate(self.plan, GRAPH, self.cluster, Costs())
        self.adapting.take_up(self.plan, step.own_seconds(self.plan.devices), self.cluster)

    def step(self, number: int, slowdowns: dict[str, float]) -> None:
        real = estimate(self.plan, GRAPH, self.cluster.slowed(slowdowns), Costs())
        busy: Busy = tuple(each * self.noise.lognormvariate(0, self.spread) for each in real.own_seconds(self.plan.devices))
        self.now += real.step_seconds
        if self.adapting.hear(number, busy):
            self.adapting.looked_at()
            found = self.adapting.health.slowdowns
            move = best_move(self.plan, GRAPH, self.cluster, ROWS, found, least_gain=self.adapting.least_gain)
            if move.pays:
                self.moves.append((number, move))
                self.adapting.moves(move.gain)
                self.plan, self.cluster = move.plan, move.cluster
                self._take_up()


@pytest.mark.parametrize("spread", [slow(0.03), 0.1, slow(0.15)])
def test_noise_moves_nothing_in_500_steps(spread: float) -> None:
    run = Run(1, spread)
    for number in range(500):
        run.step(number, {})
    assert not run.moves and not run.said


def test_a_throttled_device_is_found_within_20_steps_and_so_is_that_it_no_longer_is() -> None:
    run = Run(2, 0.05)
    for number in range(200):
        run.step(number, {"h0/1": 3.0 if 50 <= number < 120 else 1.0})
    (there, first), (back, second) = run.moves
    assert 50 < there <= 50 + WINDOW + EVERY and 120 < back <= 120 + WINDOW + EVERY
    assert first.plan.replica_rows(64)[1] == (48, 64) and second.plan.replica_rows(64)[1] == (32, 64)
    assert run.adapting.least_gain == LEAST_GAIN, "both have kept to what was predicted"
    assert any("as fast as the others again" in each for each in run.said)


def test_each_time_that_a_device_becomes_slow_is_told_once() -> None:
    """Where nothing moves: with runtime.rebalance off."""
    run, told = Run(4, 0.03), list[int]()
    for number in range(300):
        slow = {"h0/1": 3.0 if number // 60 % 2 else 1.0}
        real = estimate(run.plan, GRAPH, THERE.slowed(slow), Costs())
        busy: Busy = tuple(each * run.noise.lognormvariate(0, run.spread) for each in real.own_seconds(run.plan.devices))
        if run.adapting.hear(number, busy):
            run.adapting.looked_at()
            told.append(number // 60)
    assert told == [1, 3]
    assert sum("as fast as the others again" in each for each in run.said) == 2


def test_more_is_wanted_after_a_move_that_brought_nothing() -> None:
    run = Run(3, 0.02)
    for number in range(50):
        run.step(number, {"h0/1": 3.0})
    assert len(run.moves) == 1
    run = Run(3, 0.02)
    run.adapting.moves(0.5)
    for number in range(40):
        run.step(number, {})
    assert not run.moves and run.adapting.least_gain == LEAST_GAIN, "nothing was promised beside no step"
    for gain, wanted in ((0.5, 2 * LEAST_GAIN), (-0.1, LEAST_GAIN)):
        run.adapting.moves(gain)
        run._take_up()
        for number in range(40, 80):
            run.step(number, {})
        assert run.adapting.least_gain == wanted
        assert len(run.said) == 1 and "saved 0% of a step (50% was predicted)" in run.said[0]
    run.adapting.moves(0.5)
    for _ in range(2):  # and then a plan by hand
        run._take_up()
    for number in range(80, 120):
        run.step(number, {})
    assert run.adapting.least_gain == LEAST_GAIN


def test_nothing_is_said_of_a_device_that_the_plan_leaves_out() -> None:
    run = Run(5, 0.02)
    first, second = estimate(run.plan, GRAPH, THERE, Costs()).own_seconds(run.plan.devices)
    for number in range(40):
        run.adapting.hear(number, (first, 3 * second))
    assert [each.device for each in run.adapting.health.slow] == ["h0/1"]
    alone = at_work(there=cluster((1e9,)))
    run.adapting.take_up(alone, (1.0,), THERE)
    for number in range(40, 80):
        run.adapting.hear(number, (1.0,))
    assert len(run.adapting.health.devices) == 1 and not run.said


def test_costs_and_settings_of_the_run_count() -> None:
    """A plan for one kind of state is compared by that kind."""
    config = ROWS.with_values({"memory.zero": "2"})
    plan = at_work(config)
    move = best_move(plan, GRAPH, THERE, config, {"h0/1": 3.0})
    assert move.pays and any(state.kept.sharding == "owners" for state in move.plan.parameter_states)
    assert replace(move, gain=0.0).against
