"""What messages take of the devices at their ends: more makes no step shorter, none changes nothing, work goes elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import whale
from tests.unit.planning.graphs import chain, cluster
from whale.capture import capture
from whale.config import Config
from whale.estimate import Costs, Line, estimate
from whale.estimate.costs.communication import Volume, all_to_all_volume, ring_volume
from whale.estimate.events.engine import EventTimes, Task, Transfer, run
from whale.estimate.prices.collective_costs import CollectiveCosts, StagePlace, copied_bytes
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import NO_HANDLING, Cluster, Handling, Link
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import make_plan
from whale.sharding.bridges import Transport

HANDLING = Handling(seconds=1e-4, per_byte=1e-9)


def handling(there: Cluster, handled: Mapping[int, Handling]) -> Cluster:
    """The cluster of one host, whose devices of these numbers handle messages so."""
    (host,) = there.hosts
    devices = tuple(replace(device, handling=handled.get(number, NO_HANDLING)) for number, device in enumerate(host.devices))
    return replace(there, hosts=(replace(host, devices=devices),))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        with whale.split(2):
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def feed_forward() -> ModelGraph:
    with torch.device("meta"):
        batch = {"x": torch.zeros(256, 512), "y": torch.zeros(256, 512)}
        return capture(FeedForward(512), batch, lambda output, batch: nn.functional.mse_loss(output, batch["y"]))[0]


SPLIT, CHAIN = feed_forward(), chain(8, width=64)
TWO = replace(cluster((1e9, 1e9)), hosts=tuple(replace(host, link=Link(1e8, 1e-4)) for host in cluster((1e9, 1e9)).hosts))
CASES: dict[str, tuple[ModelGraph, dict[str, object]]] = {
    "data parallel": (CHAIN, {}),
    "pipeline": (CHAIN, {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}),
    "split": (SPLIT, {}),
    "split in halves": (SPLIT, {"communication.overlap": True}),
}


def planned(case: str, there: Cluster = TWO) -> Plan:
    graph, settings = CASES[case]
    return make_plan(graph, there, Config({"planning.search": "off", **settings}), rows=16)


PLANS = {case: planned(case) for case in CASES}


def seconds(case: str, handled: Mapping[int, Handling]) -> float:
    return estimate(PLANS[case], CASES[case][0], handling(TWO, handled)).step_seconds


@pytest.mark.parametrize(
    ("volume", "num_messages", "num_bytes"),
    [
        (ring_volume(4, Line(8.0), 2), 12, 24.0),
        (ring_volume(4, Line(8.0), 1), 6, 12.0),
        (all_to_all_volume(4, Line(8.0)), 6, 3.0),
        (ring_volume(1, Line(8.0), 2), 0, 0.0),
    ],
)
def test_what_a_device_sends_and_receives(volume: Volume, num_messages: float, num_bytes: float) -> None:
    assert volume == Volume(num_messages, Line(num_bytes))
    assert volume.seconds(Handling(2.0, 3.0)) == 2 * num_messages + 3 * num_bytes


def one_message(handled: float, *before: Task) -> EventTimes:
    """A worker makes something, hands it on, and computes on; the other, idle but for `before`, takes it."""
    sender = [Task(1.0, sends=(0,)), Task(2.0)]
    receiver = [*before, Task(1.0, needs=(0,), posts=(0,) if not before else ())]
    return run([sender, receiver], [Transfer(1.0, 1.0, 2, handled=((0, handled), (1, handled)))], [])


def test_a_message_takes_time_of_who_computes_and_none_of_who_waits() -> None:
    found = one_message(0.5)
    assert found.tasks == ([(0.0, 1.0), (1.0, 3.5)], [(2.0, 3.0)])


def test_what_is_left_of_a_message_comes_before_the_task_that_needs_it() -> None:
    found = one_message(1.25)
    assert found.tasks == ([(0.0, 1.0), (1.0, 4.25)], [(2.0, 3.25)])


def test_a_message_takes_time_of_a_task_at_work() -> None:
    found = one_message(0.5, Task(4.0, posts=(0,)))
    assert found.tasks[1] == [(0.0, 4.5), (4.5, 5.5)]


def test_two_messages_take_time_of_a_task_one_after_the_other() -> None:
    transfers = [Transfer(0.0, 2.0, 1, handled=((1, 1.5),)), Transfer(0.0, 1.0, 1, handled=((1, 0.25),))]
    found = run([[Task(1.0, sends=(0, 1))], [Task(1.0, needs=(0, 1))]], transfers, [])
    assert found.tasks[1] == [(3.0, 4.0)], "both are handled by the time that the first is there"
    later = run([[Task(1.0, sends=(1,)), Task(1.75, sends=(0,))], [Task(1.0, needs=(1,)), Task(1.0)]], transfers, [])
    assert later.tasks[1] == [(2.0, 4.5), (4.5, 5.5)], "of the first, 1.5 beside the task that is at work"


@pytest.mark.parametrize("case", CASES)
def test_nothing_handled_changes_nothing(case: str) -> None:
    assert seconds(case, {0: Handling(), 1: Handling()}) == PLANS[case].step_seconds
    assert planned(case, handling(TWO, {})) == PLANS[case]


amounts = st.builds(Handling, st.floats(0, 1e-2), st.floats(0, 1e-7))


@settings(max_examples=25)
@given(st.sampled_from(["data parallel", "pipeline"]), amounts, amounts, amounts)
def test_more_that_is_handled_makes_no_step_shorter(case: str, first: Handling, second: Handling, more: Handling) -> None:
    larger = Handling(second.seconds + more.seconds, second.per_byte + more.per_byte)
    assert seconds(case, {0: first, 1: larger}) >= seconds(case, {0: first, 1: second}) * (1 - 1e-9)
    assert seconds(case, {1: second}) >= PLANS[case].step_seconds * (1 - 1e-9)


@settings(max_examples=25)
@given(st.sampled_from(["split", "split in halves"]), amounts, amounts)
def test_more_that_alike_devices_handle_makes_no_step_of_a_split_group_shorter(case: str, handled: Handling, more: Handling) -> None:
    """Of unlike ones it may: the more of what the link takes is work of a device that is early, the less the late one waits."""
    larger = Handling(handled.seconds + more.seconds, handled.per_byte + more.per_byte)
    assert seconds(case, dict.fromkeys((0, 1), larger)) >= seconds(case, dict.fromkeys((0, 1), handled)) * (1 - 1e-9)
    assert seconds(case, {1: handled}) <= seconds(case, dict.fromkeys((0, 1), handled)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("transport", "num_bytes"), [("all-reduce", 24.0), ("all-gather", 24.0), ("reduce-scatter", 24.0), ("all-to-all", 12.0), ("", 0.0)]
)
def test_what_a_device_copies_beside_a_message(transport: Transport, num_bytes: float) -> None:
    """Three bytes over its memory for each: of the whole tensor; of an all-to-all among four, of its part before and its part after."""
    assert copied_bytes(4, transport, Line(8.0)) == Line(num_bytes)


def test_copies_are_work_of_a_device_that_handles_what_it_sends() -> None:
    """What two devices sum they need not copy first; what four do, they do."""
    graph, (stage,) = SPLIT, PLANS["split"].replicas[0].stages
    there = handling(cluster((1e9,) * 4), {0: HANDLING})
    first, second, *_ = there.devices
    prices = Prices(graph, there, Costs())
    bridges = prices.bridges(stage.ops, stage.shards, frozenset())
    for width in (2, 4):
        collective_costs = CollectiveCosts(prices, StagePlace((tuple(device.name for device in there.devices[:width]),), 16, 1, 1))
        messages = [volume.line(HANDLING) for volume in collective_costs.volumes(bridges)]
        copies = [own.at(16) - line.at(16) for own, line in zip(collective_costs.handled(bridges, first), messages, strict=True)]
        num_sums = [line.at(16) > 0 for line in messages]
        assert any(num_sums)
        assert copies == pytest.approx([(width > 2) * count * 3 * 16 * 512 * 4 / first.bandwidth for count in num_sums])
        assert collective_costs.handled(bridges, second) == (Line(), Line()), "nobody has measured it"


def test_what_all_wait_for_and_what_one_handles_is_one_message() -> None:
    """A device that handles all of a message waits no longer for it; one that takes longer than the link is what the others wait for."""
    little, most = seconds("split", {1: Handling(1e-6)}), seconds("split", {1: Handling(1e-2)})
    assert little == pytest.approx(PLANS["split"].step_seconds, rel=1e-3)
    assert most > 1.5 * little


def test_who_handles_longer_takes_less() -> None:
    there = handling(TWO, {0: Handling(1e-5), 1: Handling(2e-3, 2e-8)})
    for shard in planned("split", there).replicas[0].stages[0].shards:
        assert shard.sizes[0] > shard.sizes[1]
    first, second = (stop - start for start, stop in planned("data parallel", there).replica_rows(16))
    assert first > second


def test_cpu_ranks_take_turns_in_halves_where_it_is_known_what_messages_take() -> None:
    cpus = replace(TWO, hosts=tuple(replace(h, devices=tuple(replace(d, model="cpu") for d in h.devices)) for h in TWO.hosts))
    slow = replace(cpus, hosts=tuple(replace(host, link=Link(5e6, 1e-4)) for host in cpus.hosts))
    known = handling(slow, {0: HANDLING, 1: HANDLING})
    assert not planned("split", slow).replicas[0].stages[0].overlap
    assert planned("split", known).replicas[0].stages[0].overlap
    busy = handling(slow, dict.fromkeys((0, 1), Handling(0.0, 2e-7)))
    assert not planned("split", busy).replicas[0].stages[0].overlap, "where handling is all of it nothing is hidden"
