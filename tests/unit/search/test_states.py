"""State is shared out among devices, and kept on hosts, where memory demands it and as the settings say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.planning.graphs import Graph, cluster, device
from whale.config import Config
from whale.errors import ConfigError, OutOfMemory, PlanError
from whale.estimate import Costs, StepEstimate, estimate
from whale.estimate.prices.prices import Prices
from whale.estimate.step.program import gather
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import MemoryShortage
from whale.planning.plan import EstimatedPlan
from whale.planning.strategy import StateSpec
from whale.planning.written import write_plan
from whale.search import decide
from whale.search.freedom import COMPARED, States
from whale.search.open import AsSet
from whale.search.ranking import gains_from

WIDTH, NUM_LAYERS = 64, 4
WEIGHTS = NUM_LAYERS * WIDTH * WIDTH * 4
"""Bytes of the model; training takes four times as much, beside activations."""
REPLICAS: dict[str, Any] = {
    "pipeline.num_stages": 1,
    "pipeline.num_micro_batch": 1,
    "memory.fraction": 1.0,
    "planning.search": "off",
}

SMALL_BUCKETS: dict[str, Any] = {"communication__bucket_bytes": 1}
"""A bucket for each layer: those on their way are beside what a device holds."""


def layers() -> ModelGraph:
    graph = Graph()
    value = graph.input("x", WIDTH)
    for index in range(NUM_LAYERS):
        weight = graph.parameter(f"layer{index}.weight", WIDTH, WIDTH)
        value = graph.call(f"layer{index}", "aten.linear.default", value, weight, width=WIDTH, flops=8 * WIDTH * WIDTH)
    graph.sum_loss(value)
    return graph.build()


def of_memories(*memories: float, host: float | None = None) -> Cluster:
    """A host of equally fast devices whose memories are so many times the bytes of the weights."""
    devices = tuple(device(f"h/{index}", "h", 1e9, round(times * WEIGHTS)) for index, times in enumerate(memories))
    return Cluster("test", (Host("h", devices, Link(1e10, 1e-9), memory=None if host is None else round(host * WEIGHTS)),), None)


def planned(on: Cluster, **settings: object) -> tuple[Plan, StepEstimate]:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return decide(None, layers(), on, Config(REPLICAS | named), rows=8)


def forms(plan: Plan) -> tuple[str, str, str]:
    """Sharding of gradients and of what the optimizer steps, and the home of the latter."""
    state = plan.state_of("layer0.weight")
    assert state.gradient is not None
    return state.gradient.sharding, state.kept.sharding, state.kept.home


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"zero": 0}, ("stage", "stage", "device")),
        ({"zero": "1"}, ("stage", "owners", "device")),
        ({"zero": 2, "offload": "optimizer"}, ("owners", "owners", "host")),
        ({"zero": 3}, ("owners", "owners", "device")),
        ({"zero": {"layer0.*": 1, "*": 3}}, ("stage", "owners", "device")),
        ({"zero": {"layer1.*": 1, "*": 2}, "offload": "auto"}, ("owners", "owners", "device")),
        ({}, ("stage", "stage", "device")),
        ({"offload": "auto"}, ("stage", "stage", "device")),
    ],
)
def test_what_is_set_is_what_the_plan_says(settings: dict[str, object], expected: tuple[str, str, str]) -> None:
    plan, _ = planned(of_memories(9, 9), memory=settings)
    assert forms(plan) == expected
    assert ("form: float32, sharding" in str(plan)) == (expected != ("stage", "stage", "device"))


def test_each_pattern_of_stages_has_parameters() -> None:
    with pytest.raises(ConfigError, match=r"memory.zero: no parameter uses 'head\*'"):
        planned(of_memories(9, 9), memory={"zero": {"head*": 3, "*": 1}})
    with pytest.raises(ConfigError, match=r"memory.zero: layer0.\*: '4' is not one of 0, 1, 2, 3"):
        planned(of_memories(9, 9), memory={"zero": {"layer0.*": 4, "*": 1}})
    with pytest.raises(ConfigError, match=r"memory.zero does not end with the pattern '\*'"):
        planned(of_memories(9, 9), memory={"zero": {"layer0.*": 3}})


def test_state_is_shared_out_where_nothing_fits_otherwise() -> None:
    on = of_memories(3.6, 3.6)
    with pytest.raises(MemoryShortage):
        planned(on, memory={"zero": 0})
    plan, step = planned(on, **SMALL_BUCKETS)
    assert forms(plan) == ("owners", "owners", "device") and len(plan.replicas) == 2
    assert plan.choices[0].bound == "nothing fits otherwise" and not plan.keeper_shares
    assert all(each.peak.total <= each.capacity for each in step.devices)


def test_what_each_keeps_follows_its_free_memory() -> None:
    plan, step = planned(of_memories(2.9, 4.6), memory={"zero": 2}, **SMALL_BUCKETS)
    assert len(plan.devices) == 2 and plan.keeper_shares[1] > 2 * plan.keeper_shares[0]
    assert all(each.peak.total <= each.capacity for each in step.devices)
    even = estimate(replace(plan, keeper_shares=()), layers(), of_memories(2.9, 4.6), Costs(bucket_bytes=1))
    assert any(each.peak.total > round(2.9 * WEIGHTS) for each in even.devices), "equal parts would not fit"


def test_what_fits_no_other_way_is_kept_on_hosts() -> None:
    on = of_memories(3.1, 3.1)
    with pytest.raises(MemoryShortage):
        planned(on)
    plan, step = planned(on, memory={"offload": "auto"})
    assert forms(plan) == ("owners", "owners", "host"), "of two hosts' steps, or one that each has half of, the faster"
    whole, step = planned(of_memories(2.4, 2.4), memory={"offload": "auto", "zero": 0})
    assert forms(whole) == ("stage", "stage", "host") and {each.on_host for each in step.devices} == {4 * WEIGHTS}
    shared, small = planned(of_memories(2.5, 2.5), memory={"offload": "auto", "zero": 1})
    assert forms(shared) == ("stage", "owners", "host") and sum(each.on_host * len(each.devices) for each in small.devices) == 4 * WEIGHTS


@pytest.mark.parametrize(("memories", "zero", "expected"), [((3.0, 9), 0, [3, 3]), ((3.4, 9), 0, [2, 2]), ((2.9, 2.9), 1, [1, 1])])
def test_no_more_is_kept_on_hosts_than_does_not_fit(memories: tuple[float, float], zero: int, expected: list[int]) -> None:
    on, asked = of_memories(*memories), {"zero": zero, "offload": "auto"}
    plan, step = planned(on, memory=asked)
    layer, told = WEIGHTS / NUM_LAYERS, [step.of(device) for device in plan.devices]
    assert [each.on_host / (4 * layer) for each in told] == expected
    assert all(each.peak.total <= each.capacity for each in told)
    assert told[0].peak.total + 2 * layer > told[0].capacity, "one more would fit"
    homes = [plan.state_of(f"layer{index}.weight").kept.home for index in range(NUM_LAYERS)]
    assert f"({homes.count('host')} of 4 parameters on hosts)" in plan.choices[0].decision
    _, slower = planned(on, memory=asked | {"offload": "optimizer"})
    assert slower.step_seconds > step.step_seconds


def test_what_fits_in_other_stages_stays_on_devices() -> None:
    stages = {"pipeline.num_stages": 2, "memory.fraction": 1.0, "planning.search": "off", "memory.offload": "auto", "memory.zero": 0}
    plan, step = decide(None, layers(), of_memories(1.1, 2.2), Config(stages), rows=4)
    assert len(plan.replicas) == 1 and [step.of(device).on_host > 0 for device in ("h/0", "h/1")] == [True, False]


def test_a_written_plan_keeps_no_more_on_hosts_than_does_not_fit() -> None:
    written = {"stages": [{"devices": ["h/0"], "ops": ["layer0 .. loss"]}]}
    plan, step = decide(None, layers(), of_memories(3.2), Config(REPLICAS | {"memory.offload": "auto", "replicas": [written]}), rows=4)
    assert [each.on_host for each in step.devices] == [2 * WEIGHTS] and "everything" in {each.subject for each in plan.choices}


@pytest.mark.parametrize("offload", ["optimizer", "auto"])
def test_a_host_has_room_for_what_is_left_there(offload: str) -> None:
    written = {"stages": [{"devices": ["h/0"], "ops": ["layer0 .. loss"]}]}
    asked = {"offload": offload, "offload_as_needed": True}
    for settings in (REPLICAS, REPLICAS | {"replicas": [written]}):
        _, step = decide(None, layers(), of_memories(3.2, host=2.1), Config(settings | {"memory": asked}), rows=4)
        assert [each.on_host for each in step.devices] == [2 * WEIGHTS]
        with pytest.raises(PlanError, match=r"out of memory on host h: the plan needs 128.00 KiB"):
            decide(None, layers(), of_memories(3.2, host=1.9), Config(settings | {"memory": asked}), rows=4)


def test_a_host_without_the_memory_is_an_error() -> None:
    planned(of_memories(9, 9, host=8), memory={"zero": 0, "offload": "optimizer"})
    with pytest.raises(PlanError, match=r"out of memory on host h: the plan needs 512.00 KiB, 505.60 KiB usable"):
        planned(of_memories(9, 9, host=7.9), memory={"zero": 0, "offload": "optimizer"})


def test_weights_live_on_hosts_where_what_the_optimizer_keeps_is_not_all() -> None:
    on = of_memories(1.8)
    with pytest.raises(MemoryShortage):
        planned(on, memory={"offload": "optimizer"}, **SMALL_BUCKETS)
    whole, all_there = planned(on, memory={"offload": "optimizer+parameters"}, **SMALL_BUCKETS)
    assert "compute and optimizer form: float32, sharding stage, home host" in str(whole) and all_there.devices[0].on_host == 4 * WEIGHTS
    plan, step = planned(of_memories(1.8), memory={"offload": "auto"}, **SMALL_BUCKETS)
    homes = [plan.state_of(f"layer{index}.weight").compute.home for index in range(NUM_LAYERS)]
    assert 0 < homes.count("host") < NUM_LAYERS, "no more than does not fit"
    assert f"(4 of 4 parameters on hosts, {homes.count('host')} as ops read them)" in plan.choices[0].decision
    assert step.devices[0].peak.total <= step.devices[0].capacity and step.step_seconds < all_there.step_seconds
    with pytest.raises(PlanError, match=r"out of memory on host h: the plan needs 256.00 KiB, 249.60 KiB usable"):
        planned(of_memories(1.8, host=3.9), memory={"offload": "optimizer+parameters"}, **SMALL_BUCKETS)


def test_auto_takes_activations_to_hosts_where_they_do_not_fit() -> None:
    settings = REPLICAS | {"memory.offload": "auto", "recompute.policy": "none"}
    plan, step = decide(None, layers(), of_memories(17), Config(settings), rows=1024)
    assert plan.replicas[0].stages[0].offloads and "memory.offload: activations (of 1 of 1 stage)" in plan.choices[0].decision
    assert all(each.peak.total <= each.capacity for each in step.devices)


def test_activations_wait_on_hosts_where_that_is_asked() -> None:
    def for_backward(host: float | None, **memory: object) -> tuple[Plan, StepEstimate]:
        return decide(None, layers(), of_memories(17, host=host), Config(REPLICAS | {"memory": memory}), rows=1024)

    with pytest.raises(MemoryShortage):
        for_backward(None)
    plan, step = for_backward(12.1, offload="activations")
    assert plan.replicas[0].stages[0].offloads and "activations are offloaded to the host" in str(plan)
    assert {each.on_host / WEIGHTS for each in step.devices} == {12} and all(each.peak.activations == 0 for each in step.devices)
    with pytest.raises(PlanError, match=r"out of memory on host h: the plan needs 768.00 KiB, 761.60 KiB usable"):
        for_backward(11.9, offload="activations")
    with pytest.raises(PlanError, match="the plan shares out or offloads state, which YAML does not hold"):
        write_plan(plan, layers())


def in_turn(config: Config, fits: Callable[[StateSpec], bool], *, gains: bool, num_devices: int = 2) -> list[tuple[str, str, float]]:
    """The states that are looked at, with their share of the effort, where those that `fits` names have a plan."""
    plan, _ = planned(of_memories(9, 9))
    fitting, looked = set[str](), list[tuple[str, str, float]]()

    def best(home: str) -> Plan | None:
        return plan if home in fitting else None

    for state, share in States.of(config, num_devices).in_turn(best, lambda plan, level: gains and level != "3"):
        looked.append((str(state.zero), state.offload, share))
        if fits(state):
            fitting.add(state.offload)
    return looked


def test_the_next_state_is_looked_at_where_nothing_fits_or_where_it_may_gain() -> None:
    every = Config({})
    assert in_turn(every, lambda state: True, gains=False) == [("0", "none", 1)]
    assert in_turn(every, lambda state: True, gains=True) == [("0", "none", 1), ("2", "none", COMPARED)]
    assert in_turn(every, lambda state: state.zero != "0", gains=False) == [("0", "none", 1), ("2", "none", 1)]
    assert in_turn(every, lambda state: False, gains=True) == [(level, "none", 1) for level in "023"]
    assert in_turn(every, lambda state: False, gains=True, num_devices=1) == [("0", "none", 1)]
    assert in_turn(Config({"memory.zero": 1}), lambda state: True, gains=True) == [("1", "none", 1)]


def test_hosts_come_last_and_each_steps_a_part() -> None:
    every, levels = Config({"memory.offload": "auto"}), "023"
    short = [(level, "none", 1.0) for level in levels]
    halves = [("0", "optimizer", 1), ("2", "optimizer", COMPARED)]
    found = in_turn(every, lambda state: state.offload == "optimizer", gains=False)
    assert found == [*short, *halves, *((level, "activations", 1) for level in levels)]
    found = in_turn(every, lambda state: state.offload == "optimizer+parameters", gains=False)
    assert found[-1] == ("0", "optimizer+parameters", 1) and len(found) == 10


@pytest.mark.parametrize(("least", "policy", "expected"), [(0.97, "auto", True), (0.99, "auto", False), (0.97, "full", False)])
def test_a_state_is_compared_where_not_computing_again_saves_a_fiftieth_of_the_step(least: float, policy: str, expected: bool) -> None:
    on, config = of_memories(9, 9), Config({"recompute.policy": policy})
    plan, step = planned(on)
    again = replace(plan.replicas[0], pipeline=replace(plan.replicas[0].pipeline, recomputed_stages=(0,)))
    slow = replace(plan, replicas=(again, *plan.replicas[1:]), step_seconds=step.step_seconds / least)
    gains = gains_from(layers(), on, config)
    assert gains(slow, "2") is expected and not gains(slow, "3") and not gains(plan, "2")
    assert not gains_from(layers(), on, config.with_values({"planning.effort": 1}))(slow, "2"), "one such plan takes more than all effort"


def test_the_least_memory_is_looked_for_with_every_state() -> None:
    plan, step = planned(of_memories(9, 9), **{"planning.search": "auto", "planning.objective": "memory"})
    others = plan.choices[0].runner_up.split("; ")
    held = [next(float(each.split(": ")[-1].split()[0]) for each in others if f"memory.zero: {zero}" in each) for zero in "23"]
    assert held[1] < held[0] and max(each.peak.total for each in step.devices) / 1024 < held[1], "split, it has no copies at all"


def test_equal_devices_are_priced_once_whatever_they_keep() -> None:
    on = of_memories(*(9.0,) * NUM_LAYERS)
    plan, _ = planned(on, memory__zero=2, pipeline__num_micro_batch=2)
    gathered = gather(plan, Prices(layers(), on, Costs.of(Config({"memory.zero": 2}))))
    assert len(plan.replicas) == NUM_LAYERS, "each keeps another layer"
    assert len({id(worker) for worker in gathered.workers}) == 1


def test_the_cpu_of_a_host_steps_for_all_its_devices_whatever_the_costs_say() -> None:
    hosts = []
    for name, count in (("a", 2), ("b", 1)):
        devices = tuple(replace(device(f"{name}/{index}", name), host_link=1e12) for index in range(count))
        hosts.append(Host(name, devices, Link(1e10, 1e-9)))
    on, settings = Cluster("test", tuple(hosts), Link(1e10, 1e-9)), {"memory.zero": 0, "memory.offload": "optimizer"}
    plan, _ = decide(None, layers(), on, Config(REPLICAS | settings), rows=9)
    last = {name: each.compute[-1] for each in estimate(plan, layers(), on).devices for name in each.devices}
    assert len(plan.replicas) == 3
    assert last["a/0"].end - last["a/0"].start > 1.2 * (last["b/0"].end - last["b/0"].start)


def test_one_device_shares_with_nobody() -> None:
    on = cluster((1e9,), memory=round(3.6 * WEIGHTS))
    with pytest.raises(MemoryShortage):
        decide(None, layers(), on, Config(REPLICAS), rows=8)


def test_weights_are_shared_out_where_nothing_fits_otherwise() -> None:
    plan, step = planned(of_memories(2.85, 2.85), **SMALL_BUCKETS)
    assert plan.choices[0].decision == "memory.zero: 3, memory.offload: none" and plan.state_of("layer0.weight").is_gathered
    whole, slow = planned(of_memories(9, 9), memory={"zero": 2}, **SMALL_BUCKETS)
    assert not whole.state_of("layer0.weight").is_gathered and slow.step_seconds < step.step_seconds


@pytest.mark.parametrize("faulty", ["0", "2", "3"])
def test_other_faults_are_no_lack_of_memory(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_zero(self: AsSet, strategy: object) -> EstimatedPlan:
        if self.config.memory.zero == faulty:
            raise PlanError("stage 0 of replica 0 has no op")
        raise OutOfMemory("nothing fits")

    monkeypatch.setattr(AsSet, "realize", with_zero)
    with pytest.raises(PlanError, match="stage 0 of replica 0 has no op"):
        planned(of_memories(9, 9))


def test_what_a_search_finds_short_is_lack_of_memory() -> None:
    """On devices that not even the weights alone fit on, and on hosts."""
    for times, host, offload in ((0.01, None, "none"), (2.4, 0.1, "optimizer")):
        settings = {"memory.fraction": 1.0, "memory.offload": offload}
        with pytest.raises(OutOfMemory):
            decide(None, layers(), of_memories(times, times, host=host), Config(settings), rows=8)


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_that_are_rounded_travel_in_fewer_bytes(zero: int) -> None:
    on = replace(of_memories(9, 9), hosts=tuple(replace(host, link=Link(1e6, 1e-9)) for host in of_memories(9, 9).hosts))
    (_, own), (plan, rounded), (_, fed) = (
        planned(on, memory={"zero": zero}, gradient={"sum_dtype": dtype, "error_feedback": feeds_back})
        for dtype, feeds_back in (("own", False), ("bf16", False), ("bf16", True))
    )
    small, accumulated = planned(on, memory={"zero": zero}, gradient={"dtype": "bf16"}, **{"pipeline.num_micro_batch": 2})
    assert "gradients are accumulated in bfloat16" in str(small) and "accumulated" not in str(plan)
    assert all(state.gradient and state.gradient.dtype == "bfloat16" for state in small.parameter_states)
    sent = [sum(sync.num_bytes for sync in step.devices[0].syncs) for step in (own, rounded, fed, accumulated)]
    given = WEIGHTS if zero else 0  # of weights, after the step
    assert sent == [WEIGHTS + given, *[WEIGHTS / 2 + given] * 3]
    assert own.step_seconds > 1.3 * rounded.step_seconds and rounded.step_seconds < fed.step_seconds
    assert fed.devices[0].peak.gradients == rounded.devices[0].peak.gradients + WEIGHTS
    assert "gradients are summed in bfloat16" in str(plan)


def test_error_feedback_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"error_feedback has no effect: .* \(gradient.sum_dtype: own, gradient.dtype: own\)"):
        planned(of_memories(9, 9), gradient={"error_feedback": True})
    with pytest.raises(ConfigError, match=r"gradient.sum_dtype: bf16, gradient.dtype: bf16\)"):
        planned(of_memories(9, 9), gradient={"error_feedback": True, "dtype": "bf16", "sum_dtype": "bf16"})
