"""The estimate of a step: its own schedule with its communication, memory over time, and equal replicas simulated once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.graphs import ROWS, Graph, chain, cluster, device, scope
from whale.config import Config
from whale.estimate import Costs, estimate, pipeline_seconds
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.plan import Plan, states_of
from whale.ir.schedule import COMPUTE, Kind
from whale.planning import make_plan

FAST = Link(1e15, 0.0)


def planned(graph_layers: int, there: Cluster, rows: int = 16, width: int = 64, **config: object) -> tuple[Plan, object]:
    keys = {f"pipeline.{name}": value for name, value in config.items()}
    graph = chain(graph_layers, width=width)
    return make_plan(graph, there, Config(keys), rows=rows), graph


def pair(link: Link, num_hosts: int = 1, memory: int = 2**30) -> Cluster:
    """Hosts of two equal devices; one link for all."""
    hosts = tuple(Host(f"h{h}", tuple(device(f"h{h}/{i}", f"h{h}", 1e9, memory) for i in range(2)), link) for h in range(num_hosts))
    return Cluster("pair", hosts, link)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_without_communication_the_bound_is_the_estimate(schedule: str) -> None:
    plan, graph = planned(8, pair(FAST), schedule=schedule, num_stages=2, num_micro_batch=4)
    found = estimate(plan, graph, pair(FAST), Costs(launch_seconds=0.0))
    ranks = [sum(span.end - span.start for span in each.compute if span.action.micro_batch == 0) for each in found.devices]
    optimizer = max(each.optimizer for each in found.devices)
    assert found.step_seconds == pytest.approx(float(pipeline_seconds(schedule, ranks, 4)) + optimizer, rel=0.03)
    assert found.straggler.exposed == pytest.approx(0.0, abs=1e-9)


def test_the_plan_has_the_estimates_time_and_memory() -> None:
    there = cluster((3e9, 1e9))
    plan, graph = planned(8, there, num_stages=2, num_micro_batch=4)
    found = estimate(plan, graph, there)
    assert plan.step_seconds == found.step_seconds
    for stage in plan.replicas[0].stages:
        for name, figures in zip(stage.virtual_device.devices, stage.estimates, strict=True):
            assert figures.parameter_bytes + figures.activation_bytes == pytest.approx(found.of(name).peak.total, abs=2)


def test_the_states_of_the_plan_say_what_the_optimizer_keeps() -> None:
    plan, graph = planned(4, cluster((1e9,)))
    states = [states_of(graph.parameters, number) for number in (0, 2)]  # type: ignore[attr-defined]
    kept = [estimate(replace(plan, parameter_states=each), graph, cluster((1e9,))) for each in states]
    assert kept[0].devices[0].peak.optimizer == 0 < kept[1].devices[0].peak.optimizer


def test_gpipe_and_1f1b_differ_in_memory_and_in_exposed_messages() -> None:
    slow = pair(Link(1e6, 1e-4))
    estimates = {}
    for schedule in ("gpipe", "1f1b"):
        plan, graph = planned(8, slow, schedule=schedule, num_stages=2, num_micro_batch=6, rows=48)
        estimates[schedule] = estimate(plan, graph, slow)
    assert estimates["gpipe"].of("h0/0").peak.activations > estimates["1f1b"].of("h0/0").peak.activations
    assert estimates["gpipe"].step_seconds != estimates["1f1b"].step_seconds


def test_gradients_are_summed_behind_the_backward_pass() -> None:
    """With one bucket per layer all but the first layer's are hidden; with one for all none is."""
    there = pair(Link(2e7, 1e-6))
    plan, graph = planned(8, there, rows=400)
    hidden = estimate(plan, graph, there, Costs(bucket_bytes=1))
    shown = estimate(plan, graph, there, Costs(bucket_bytes=2**30))
    assert len(hidden.devices[0].syncs) == 8 and len(shown.devices[0].syncs) == 1
    assert hidden.straggler.exposed_sync < 0.3 * hidden.straggler.syncing
    assert shown.straggler.exposed_sync == pytest.approx(shown.straggler.syncing)
    assert hidden.step_seconds < shown.step_seconds


def test_updated_weights_hide_behind_the_next_forward_pass() -> None:
    """The first bucket is waited for, the others come while earlier layers compute; given before the step ends, none hides."""
    there = pair(Link(2e7, 1e-6))
    plan, graph = planned(8, there, rows=400)
    plan = replace(plan, parameter_states=states_of(graph.parameters, zero=1))  # type: ignore[attr-defined]
    late, early = (estimate(plan, graph, there, Costs(bucket_bytes=1, defers_weights=defers)) for defers in (True, False))
    given = [sync.end - sync.start for sync in late.devices[0].syncs if sync.what == "weights"]
    waited = sum(wait.end - wait.start for wait in late.devices[0].waits)
    assert len(given) == 8 == early.devices[0].num_given and not late.devices[0].num_given
    assert waited == pytest.approx(given[0]) and early.step_seconds - late.step_seconds == pytest.approx(sum(given) - waited, rel=0.01)
    assert late.straggler.busy == pytest.approx(early.straggler.busy - sum(given), rel=0.01)


def test_a_shared_card_is_slower_than_one_of_each() -> None:
    own = pair(Link(1e7, 1e-6), 2)
    shared = replace(own, hosts=tuple(replace(host, link=FAST, card=1e7) for host in own.hosts))
    own = replace(own, hosts=tuple(replace(host, link=FAST) for host in own.hosts))
    config = Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "cluster.device_place_prefer_intra_node": False})
    graph = chain(8, width=64)
    plan = make_plan(graph, own, config, rows=16)
    replicas = {r.index: {d for s in r.stages for d in s.virtual_device.devices} for r in plan.replicas}
    assert len(replicas) == 2
    alone, together = estimate(plan, graph, own), estimate(plan, graph, shared)
    assert together.step_seconds > alone.step_seconds
    assert any("card" in link.name for link in together.links)


def test_equal_replicas_are_simulated_once() -> None:
    there = cluster(*((1e9,) * 4,) * 8)
    plan, graph = planned(8, there, rows=128, num_stages=4, num_micro_batch=4)
    found = estimate(plan, graph, there)
    assert len(plan.replicas) == 8
    assert [len(each.devices) for each in found.devices] == [8] * 4
    assert sorted(name for each in found.devices for name in each.devices) == sorted(plan.devices)


def test_devices_that_do_all_at_the_same_times_are_told_as_one() -> None:
    """Copies on hosts of two devices and of one: the links that their gradients pass are unlike, and nobody is slower for it."""
    network = Link(1e8, 1e-5)
    sizes = {"h0": 2, "h1": 1}
    hosts = (Host(name, tuple(device(f"{name}/{i}", name, 1e9) for i in range(count)), FAST) for name, count in sizes.items())
    there = Cluster("uneven", tuple(hosts), network)
    plan, graph = planned(4, there, rows=12)
    (found,) = estimate(plan, graph, there).devices
    assert found.devices == ("h0/0", "h0/1", "h1/0") and found.syncs


def test_colocated_stages_and_forward_only() -> None:
    graph = Graph()
    graph.path = (scope(0, 2, "wide"),)
    value = graph.linear("layer0", graph.input("x"))
    graph.path = (scope(1, 1, "narrow"),)
    graph.sum_loss(graph.linear("layer1", value))
    built, there = graph.build(), cluster((1e9, 1e9, 1e9))
    plan = make_plan(built, there, Config({"pipeline.num_micro_batch": 2}), rows=8)
    assert estimate(plan, built, there).step_seconds > 0
    evaluated = graph.build(mode="eval")
    found = estimate(replace(plan, model=evaluated.fingerprint), evaluated, there)
    assert all(each.peak.gradients == 0 == each.peak.activations for each in found.devices)


def test_what_alike_senders_hand_to_one_device_counts_for_each() -> None:
    """Two devices to one: by senders that are simulated once the receiver holds and lists what it does by two unlike ones."""
    graph = Graph()
    graph.path = (scope(0, 2, "wide"),)
    value = graph.linear("layer0", graph.input("x"))
    graph.path = (scope(1, 1, "narrow"),)
    graph.sum_loss(graph.linear("layer1", value))
    built = graph.build()
    plan = make_plan(built, cluster((1e9, 1e9, 1e9)), Config({"pipeline.num_micro_batch": 4}), rows=16)
    (alike, one), (_, _, other) = (estimate(plan, built, cluster((1e9, speed, 1e9))).devices for speed in (1e9, 1.1e9))
    assert len(alike.devices) == 2 and one.devices == other.devices
    assert one.peak.received == other.peak.received > 0
    assert sorted((m.name, m.source, m.target) for m in one.messages) == sorted((m.name, m.source, m.target) for m in other.messages)
    assert len(one.messages) == 16


def test_gradients_are_final_when_their_layer_has_had_its_turn_at_the_rows_at_hand() -> None:
    """A last layer whose weight is large and whose work is little: by a single row it would take most of the backward pass."""
    slow = tuple(device(f"h0/{index}", "h0", 1e9, bandwidth=1e9) for index in range(2))
    there = Cluster("pair", (Host("h0", slow, FAST),), FAST)
    graph = Graph()
    value = graph.input("x", 64)
    for index in range(6):
        weight = graph.parameter(f"layer{index}.weight", 64, 64)
        value = graph.call(f"layer{index}", "aten.linear.default", value, weight, width=64, flops=50 * 2 * ROWS * 64 * 64)
    graph.sum_loss(graph.call("head", "aten.linear.default", value, graph.parameter("head.weight", 2048, 64), width=2048, flops=1024))
    built = graph.build()
    plan = make_plan(built, there, Config({"plan": {"replicas": 2}}), rows=4096)
    each = estimate(plan, built, there, Costs(bucket_bytes=1)).devices[0]
    backward = next(span for span in each.compute if span.action.kind is Kind.BACKWARD)
    largest = max(each.syncs, key=lambda sync: sync.num_bytes)
    assert backward.start < largest.start < backward.start + 0.1 * (backward.end - backward.start)


def test_gradients_that_unlike_replicas_hold_are_summed_when_all_else_is_done() -> None:
    """As the runtime does it: they are final at unlike places, so no sum hides behind a backward pass of its owners."""
    there = cluster((1e9, 1e9, 1e9), (1e9, 1e9, 1e9))
    graph = chain(8, width=64)
    for blocks, hides in (([4, 4], True), ([4, 2], False)):
        replicas = [{"num_stages": 2, "num_micro_batch": count} for count in blocks]
        plan = make_plan(graph, there, Config({"replicas": replicas}), rows=64)
        found = estimate(plan, graph, there, Costs(bucket_bytes=1))
        ends = [
            (sync, max(span.end for span in each.compute if span.action.kind in COMPUTE)) for each in found.devices for sync in each.syncs
        ]
        assert ends and any(sync.start < end for sync, end in ends) == hides


@given(
    st.sampled_from(("gpipe", "1f1b", "zb_h1", "zb_h2", "recompute_early")),
    st.lists(st.integers(1, 4), min_size=2, max_size=6),
    st.integers(1, 5),
    st.integers(0, 5),
)
def test_never_below_what_the_busiest_device_computes(schedule: str, speeds: list[int], m: int, extra: int) -> None:
    there = cluster([speed * 1e9 for speed in speeds])
    plan, graph = planned(
        8, there, rows=len(speeds) // 2 * max(m, 3) + extra, width=32, schedule=schedule, num_stages=2, num_micro_batch=max(m, 3)
    )
    found = estimate(plan, graph, there)
    assert found.step_seconds >= max(each.busy for each in found.devices) - 1e-12
    for each in found.devices:
        assert each.memory[-1][1] == pytest.approx(sum(each.stage_bytes), abs=1)  # weights, all gradients, optimizer
        assert each.peak.total == pytest.approx(max(num_bytes for _, num_bytes in each.memory), abs=1)
        assert each.busy + each.exposed <= found.step_seconds + 1e-9


@pytest.mark.parametrize("halves", [False, True])
def test_what_a_device_of_a_split_group_does_itself(halves: bool) -> None:
    """A slowed device holds up its group: all of it is busy for longer, and it alone has more of its own to do."""
    there = cluster((1e9, 1e9))
    graph = chain(4, [(scope(0, 2, kind="split"),)] * 4, width=64)
    plan = make_plan(graph, there, Config({"communication.overlap": halves}))
    before, after = (estimate(plan, graph, there.slowed({"h0/1": factor})) for factor in (1.0, 4.0))
    assert any(stage.split == 2 for stage in plan.replicas[0].stages)
    for step in (before, after):
        assert all(each.own_seconds <= each.busy for each in step.devices)
    assert after.of("h0/0").own_seconds == pytest.approx(before.of("h0/0").own_seconds)
    assert after.of("h0/1").own_seconds == pytest.approx(4 * before.of("h0/1").own_seconds)
    assert after.of("h0/0").busy > 2 * before.of("h0/0").busy


def test_what_a_device_does_itself_is_its_passes() -> None:
    there = cluster((3e9, 1e9))
    for schedule in ("1f1b", "zb_h1", "recompute_early"):
        plan, graph = planned(8, there, num_stages=2, num_micro_batch=4, schedule=schedule)
        for each in estimate(plan, graph, there).devices:
            assert each.own_seconds == pytest.approx(each.busy - each.optimizer)


def test_the_text_form() -> None:
    there = cluster((1e9, 1e9))
    plan, graph = planned(4, there)
    text = str(estimate(plan, graph, there))
    assert "computes longest" in text and "h0/0, h0/1: stage 0" in text and "link h0/0 out" in text
