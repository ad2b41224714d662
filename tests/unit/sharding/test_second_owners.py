"""Second owners: whatever host is lost, the others have copies of all; bytes are shared out evenly, and counted to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.ir.graph import ModelGraph
from whale.ir.plan import Form, Plan, states_of
from whale.planning import make_plan
from whale.sharding.parameters import ParameterShardings, parameter_shardings
from whale.sharding.second_owners import NUM_STEPS_KEPT, SecondOwners, second_owners

WIDTH = 6
Found = tuple[Plan, ModelGraph, ParameterShardings]


def planned(num_devices: int, num_layers: int, *, keeps: bool = False, **settings: int) -> Found:
    graph, names = chain(num_layers, width=WIDTH), {"num_stages": "pipeline.num_stages"}
    config = Config({"planning.search": "off", **{names[key]: value for key, value in settings.items()}})
    plan = make_plan(graph, cluster((1e9,) * num_devices), config, rows=24)
    if keeps:
        plan = replace(plan, parameter_states=states_of(graph.parameters, optimizer=Form("float32", "owners"), num_optimizer_tensors=2))
    return plan, graph, parameter_shardings(plan, graph, None)


def check_survives(found: SecondOwners, shardings: ParameterShardings, hosts: tuple[str, ...]) -> None:
    """Each host may be lost, and each has copies of its own pieces alone, or of those that were sent to it."""
    pieces = {(name, number) for name in shardings.parameters for number in range(len(shardings.kept(name).pieces))}
    there = [{(name, number) for name, numbers in own.items() for number in numbers} for own in found.copied]
    for device, own in enumerate(there):
        assert all(device in shardings.kept(name).pieces[number].owners for name, number in own)
        assert found.sent[device] <= found.copied[device].keys() and bool(found.sent[device]) == (device in found.targets)
    for lost in set(hosts):
        alive = [device for device, host in enumerate(hosts) if host != lost]
        left = set[tuple[str, int]]().union(*(there[device] for device in alive))
        for device in alive:
            for source in found.sources.get(device, ()):
                assert hosts[source] != hosts[device]
                left |= {(name, number) for name, number in there[source] if name in found.sent[source]}
        assert left == pieces


@at_most(60)
@given(st.data())
def test_any_host_may_be_lost(data: st.DataObject) -> None:
    num_devices, num_layers = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    divisors = [stages for stages in (1, 2, 3) if num_devices % stages == 0 and stages <= num_layers]
    plan, graph, shardings = planned(
        num_devices, num_layers, keeps=data.draw(st.booleans()), num_stages=data.draw(st.sampled_from(divisors))
    )
    num_idle = data.draw(st.integers(0, 2))
    drawn = data.draw(st.lists(st.sampled_from("abc"), min_size=num_devices + num_idle, max_size=num_devices + num_idle))
    found = second_owners(plan, graph, shardings, drawn)
    hosts = tuple(map(str, range(len(drawn)))) if len(set(drawn)) == 1 else tuple(drawn)
    check_survives(found, shardings, hosts)
    per_element = 4 * (1 + plan.state_of("layer0.weight").num_optimizer_tensors)
    for device, own in enumerate(found.copied):
        elements = sum(
            shardings.num_elements(graph, name, shardings.kept(name).pieces[number].region)
            for name, numbers in own.items()
            for number in numbers
        )
        assert found.copied_bytes[device] == elements * per_element
    assert sum(map(found.host_bytes, range(len(hosts)))) == NUM_STEPS_KEPT * (sum(found.copied_bytes) + sum(found.sent_bytes))


@pytest.mark.parametrize(
    ("stages", "hosts", "copied", "sent"),
    [
        (1, "abcd", 2, 0),  # four copies of four layers: each copies two layers
        (4, "aabb", 1, 1),  # each stage is alone on its host
        (2, "abab", 1, 1),  # two copies of each stage on one host: its devices share its layers
        (2, "aabb", 2, 0),  # a copy of each stage on each host
        (4, "aaaa", 1, 1),  # devices count as hosts
    ],
)
def test_bytes_are_shared_out(stages: int, hosts: str, copied: int, sent: int) -> None:
    plan, graph, shardings = planned(4, 4, num_stages=stages)
    found = second_owners(plan, graph, shardings, hosts)
    check_survives(found, shardings, tuple("0123" if hosts == "aaaa" else hosts))
    layer = 4 * WIDTH * WIDTH * (1 + plan.state_of("layer0.weight").num_optimizer_tensors)
    assert set(found.copied_bytes) == {copied * layer} and set(found.sent_bytes) == {sent * layer}
    assert {found.kept_bytes(device) for device in range(4)} == {sent * layer}


def test_what_each_host_keeps_a_copy_of_is_sent_to_none() -> None:
    plan, graph, shardings = planned(4, 4, keeps=True)
    assert any(second_owners(plan, graph, shardings, "aabb").sent_bytes)
    plan = replace(plan, keeper_groups=(0, 0, 1, 1))
    found = second_owners(plan, graph, parameter_shardings(plan, graph, None), "aabb")
    check_survives(found, parameter_shardings(plan, graph, None), tuple("aabb"))
    assert not any(found.sent_bytes)


def test_a_host_without_work_keeps_what_another_alone_holds() -> None:
    plan, graph, shardings = planned(2, 2, num_stages=2)
    found = second_owners(plan, graph, shardings, "aabb")
    assert found.targets == {0: 2, 1: 3} and found.copied_bytes[2:] == (0, 0)
