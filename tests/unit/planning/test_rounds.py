"""Plans in which hosts step on their own for some steps: who steps together, what the averages take, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planning.test_copies_of_state import GRAPH, WEIGHTS, on, planned
from whale.config import Config
from whale.errors import ConfigError, PlanError, WhaleError
from whale.estimate import Costs, estimate
from whale.ir.plan import Plan, Rounds
from whale.ir.serialization import from_json, to_json
from whale.planning import write_plan
from whale.planning.plan import plan_and_estimate
from whale.planning.verify import verify
from whale.schedules import alike_schedules
from whale.search import decide
from whale.sharding.buckets import plan_buckets
from whale.sharding.keepers import connected
from whale.sharding.parameters import parameter_shardings

LOCAL = {"communication__sync_steps": 8}
NESTEROV = {**LOCAL, "communication__outer_rate": 0.7, "communication__outer_momentum": 0.9}


def test_each_host_steps_on_its_own() -> None:
    plan = planned(on(2, 2), "0", **LOCAL)
    assert plan.rounds == Rounds((0, 0, 1, 1), 8) and not plan.keeper_groups
    assert "weights are averaged every 8 steps; 2 groups that step on their own: h0/0, h0/1; h1/0, h1/1" in str(plan)
    assert from_json(Plan, to_json(plan)) == plan
    assert planned(on(2, 2), "0", **NESTEROV).rounds == Rounds((0, 0, 1, 1), 8, 0.7, 0.9)
    assert planned(on(2, 2), "0").rounds is None


def test_hosts_that_a_replica_connects_step_together() -> None:
    plan = planned(on(1, 1, 1, 1), "0", pipeline__num_stages=2, **LOCAL)
    assert plan.rounds is not None and len(set(plan.rounds.groups)) == 2
    for replica in plan.replicas:
        assert len({plan.rounds.groups[plan.rank_of[stage.virtual_device.devices[0]]] for stage in replica.stages}) == 1
    assert connected("abcd", ["ab", "bc"]) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("hosts", "settings", "why"),
    [
        ((4,), {}, "all devices of the plan are on one host"),
        ((1, 1), {"pipeline__num_stages": 2}, "replicas connect all hosts of the plan"),
    ],
)
def test_one_group_sums_gradients_in_each_step(hosts: tuple[int, ...], settings: dict[str, object], why: str) -> None:
    plan, usual = planned(on(*hosts), "0", **LOCAL, **settings), planned(on(*hosts), "0", **settings)
    said = next(each for each in plan.choices if each.pass_name == "rounds")
    assert said.decision.startswith("none") and said.bound == why
    assert replace(plan, choices=()) == replace(usual, choices=())


def test_a_search_takes_plans_with_two_groups() -> None:
    where = on(2, 2, network=1e6)
    plan, step = decide(None, GRAPH, where, Config({"communication.sync_steps": 10_000}), rows=16)
    together, _ = decide(None, GRAPH, where, Config(), rows=16)
    assert plan.rounds is not None and plan.step_seconds < together.step_seconds
    assert "2 groups that step on their own" in next(each.decision for each in plan.choices if each.pass_name == "rounds")
    assert 0 < step.averaging < 0.1 * plan.step_seconds and step.training_seconds == pytest.approx(plan.step_seconds - step.averaging)
    assert "of averages over hosts" in str(step)


@pytest.mark.parametrize("network", [1e5, 1e7, 1e9])
def test_rounds_that_do_not_pay_are_left_out(network: float) -> None:
    """The search compares plans with one group, which have no rounds, so none is lost."""
    where = on(2, 1, network=network)
    for number in (2, 100_000):
        found, _ = decide(None, GRAPH, where, Config({"communication.sync_steps": number}), rows=16)
        assert found.step_seconds <= 1.001 * decide(None, GRAPH, where, Config(), rows=16)[0].step_seconds


def test_averages_are_paid_for_once_a_round() -> None:
    """The weights and two moments of all parameters, by one all-reduce, over a link that both hosts' devices share."""
    plans = {n: planned(on(1, 1), "0", communication__sync_steps=n) for n in (4, 8)}
    few, many = (estimate(plan, GRAPH, on(1, 1), Costs(rounds=Rounds((), n))) for n, plan in plans.items())
    assert few.averaging == pytest.approx(2 * many.averaging) and few.averaging > 0
    sums = planned(on(1, 1), "0")
    assert many.step_seconds < sums.step_seconds


def test_state_is_sharded_inside_a_group() -> None:
    plan = planned(on(2, 2), "2", "all", **LOCAL)
    assert plan.keeper_groups == (0, 0, 1, 1)
    model, shardings = GRAPH, parameter_shardings(plan, GRAPH, None)
    found = plan_buckets(plan, shardings, model, alike_schedules(plan), 1 << 20)
    assert found.summed and all({plan.sync_groups[owner] for owner in bucket.owners} in ({0}, {1}) for bucket in found.summed)
    assert not any(bucket.between for bucket in found.summed)
    outer = found.outer
    assert outer and all({plan.sync_groups[owner] for owner in bucket.owners} == {0, 1} for bucket in outer)
    num_elements = sum(model.parameter_by_name[name].spec.num_elements for name in shardings.parameters)
    assert sum(slot.stop - slot.start for bucket in outer for slot in bucket.slots) == num_elements


def test_an_outer_optimizer_takes_two_tensors_more() -> None:
    plain, nesterov = (planned(on(1, 1), "0", **settings) for settings in (LOCAL, NESTEROV))
    counts = [{state.num_optimizer_tensors for state in plan.parameter_states if state.gradient} for plan in (plain, nesterov)]
    assert counts == [{2}, {2}]
    counts = [{state.num_outer_tensors for state in plan.parameter_states if state.gradient} for plan in (plain, nesterov)]
    assert counts == [{0}, {2}]
    held = [max(each.peak.optimizer for each in estimate(plan, GRAPH, on(1, 1)).devices) for plan in (plain, nesterov)]
    assert held[1] == 2 * held[0] == 4 * WEIGHTS


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        (Rounds((0, 1), 8), r"groups that are given for 2 ranks \(\[0, 1\]\) of 4"),
        (Rounds((0, 0, 1, 1), 0), "every 0 steps"),
        (Rounds((0, 0, 1, 1), 8, -1.0), "the rate is above 0"),
        (Rounds((0, 0, 1, 1), 8, 1.0, 1.5), "below 1"),
        (Rounds((0, 0, 0, 0), 8), "all 4 ranks are in one sync group"),
        (Rounds((0, 1, 1, 0), 8), "keep state together"),
    ],
)
def test_wrong_rounds_are_refused(rounds: Rounds, message: str) -> None:
    where = on(2, 2)
    with pytest.raises(PlanError, match=message):
        verify(replace(planned(where, "2", "host"), rounds=rounds), GRAPH, where)


def test_a_replica_is_in_one_group() -> None:
    where = on(2)
    with pytest.raises(PlanError, match="replica 0 lies in several groups that step on their own"):
        verify(replace(planned(where, "0", pipeline__num_stages=2), rounds=Rounds((0, 1), 8)), GRAPH, where)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"communication.outer_momentum": 0.9}, "have no effect: communication.sync_steps is 1"),
        ({"communication.sync_steps": 0}, "is not at least 1"),
        ({"communication.sync_steps": 2, "communication.outer_momentum": 1.0}, "is not at least 0 and below 1"),
        ({"communication.sync_steps": 2, "communication.outer_rate": 0.0}, "is not above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Costs.of(Config(settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "by the plan weights are averaged every 8 steps, by the settings gradients are summed in each step"),
        ({"communication.sync_steps": 4}, "by the settings weights are averaged every 4 steps"),
        ({"communication.sync_steps": 8, "communication.outer_momentum": 0.5}, "Nesterov momentum 0.5"),
        ({"communication.sync_steps": 8, "memory.redundancy": "1"}, "memory.redundancy does not work with communication.sync_steps: 8"),
    ],
)
def test_a_plan_and_settings_are_of_one_training(settings: dict[str, object], message: str) -> None:
    where = on(2, 2)
    plan = planned(where, "0", **LOCAL)
    verify(plan, GRAPH, where, costs=Costs.of(Config({"communication.sync_steps": 8})))
    with pytest.raises(WhaleError, match=message):
        verify(plan, GRAPH, where, costs=Costs.of(Config(settings)))


def test_hosts_with_weights_of_their_own_keep_no_copies() -> None:
    settings = Config({"communication.sync_steps": 8, "memory.redundancy": "1"})
    with pytest.raises(ConfigError, match=r"memory\.redundancy does not work with communication\.sync_steps: 8"):
        plan_and_estimate(GRAPH, on(2, 2), settings)
    assert plan_and_estimate(GRAPH, on(2), settings)[0].rounds is None


def test_yaml_does_not_hold_rounds() -> None:
    with pytest.raises(PlanError, match="weights are averaged every 8 steps, which YAML does not hold"):
        write_plan(planned(on(2, 2), "0", **LOCAL), GRAPH)


def test_a_split_replica_on_each_host() -> None:
    plan = planned(on(2, 2), "0", plan={"split": 2}, **LOCAL)
    assert plan.rounds == Rounds((0, 0, 1, 1), 8) and len(plan.replicas) == 2
