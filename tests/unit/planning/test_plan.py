"""Whole plans: replicas, placement, cuts, shares, nesting, schedules, and what cannot be planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.graphs import ROWS, Graph, chain, cluster, device, scope
from tests.unit.planning.texts import plan_text
from whale.config import Config
from whale.errors import BatchError, ConfigError, PlanError
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.plan import Plan
from whale.ir.serialization import from_json, to_json
from whale.planning import MemoryShortage, make_plan
from whale.planning.verify import verify

A, B = scope(0, 1, "front"), scope(1, 1, "back")
TWO_STAGES = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}


def test_data_parallel_shares_follow_speed(golden: Callable[[str, str], None]) -> None:
    plan = make_plan(chain(4, width=256), cluster((3e9, 1e9)), Config(), rows=16)
    assert [replica.share for replica in plan.replicas] == [12, 4]
    golden("plans/uneven_data_parallel.txt", plan_text(plan))


def test_stages_are_cut_by_the_devices_own_time(golden: Callable[[str, str], None]) -> None:
    plan = make_plan(chain(8, width=256), cluster((3e9, 1e9)), Config(TWO_STAGES), rows=16)
    assert [len(stage.parameters) for stage in plan.replicas[0].stages] == [6, 2]
    golden("plans/cut_pipeline.txt", plan_text(plan))


def test_pipelines_nested_in_replicas(golden: Callable[[str, str], None]) -> None:
    graph = chain(4, [(A,), (A,), (B,), (B,)], width=256)
    plan = make_plan(graph, cluster((2e9, 2e9), (1e9, 1e9)), Config({"pipeline.num_micro_batch": 2}), rows=12)
    assert [replica.share for replica in plan.replicas] == [8, 4]
    assert plan.devices == ("h0/0", "h0/1", "h1/0", "h1/1")
    golden("plans/replicated_pipeline.txt", plan_text(plan))


def test_data_parallel_inside_a_stage_and_around_stages() -> None:
    inside = chain(2, [(scope(0, 2, "front"),), (B,)], width=64)
    plan = make_plan(inside, cluster((3e9, 1e9, 1e9)), Config(), rows=8)
    front, back = plan.replicas[0].stages
    assert front.virtual_device.devices == ("h0/1", "h0/2") and front.shares == (4, 4)  # together nearly as fast as the other
    assert back.virtual_device.devices == ("h0/0",) and back.shares == (8,)
    assert make_plan(inside, cluster((3e9, 3e9, 1e9)), Config(), rows=8).replicas[0].stages[0].shares == (6, 2)
    outer = scope(0, 2, "copies")
    around = chain(2, [(outer, scope(1, 1, "front")), (outer, scope(2, 1, "back"))], width=64)
    plan = make_plan(around, cluster((3e9, 3e9, 1e9, 1e9)), Config(), rows=8)
    assert [stage.shares for stage in plan.replicas[0].stages] == [(4, 4), (4, 4)]


def test_early_stages_get_large_memories() -> None:
    """Equal speeds, one large memory at the end of the cluster: the first stage has it."""
    hosts = Host("h", (device("h/0", "h", 1e9, 2**24), device("h/1", "h", 1e9, 2**28)), Link(1e10, 1e-6))
    plan = make_plan(chain(4, width=64), Cluster("c", (hosts,), None), Config(TWO_STAGES), rows=8)
    assert plan.devices == ("h/1", "h/0")


def test_memory_moves_the_cut() -> None:
    """With equal speeds the halves would be equal, but only five layers' weights fit on the second device."""
    layer = 4 * 256 * 256 * 4
    hosts = Host("h", (device("h/0", "h", 1e9, 2**28), device("h/1", "h", 1e9, int(5.3 * layer / 0.9))), Link(1e10, 1e-6))
    plan = make_plan(chain(16, width=256), Cluster("c", (hosts,), None), Config(TWO_STAGES), rows=2)
    assert len(plan.replicas[0].stages[1].parameters) in (4, 5)
    assert all(e.parameter_bytes + e.activation_bytes <= e.capacity for stage in plan.replicas[0].stages for e in stage.estimates)


def test_memory_moves_rows() -> None:
    """The fast device would take most rows, but its memory holds few activations."""
    roomy, tight = device("h/1", "h", 1e9, 2**30), device("h/0", "h", 3e9, 8 * 2**20)
    plan = make_plan(chain(4, width=256), Cluster("c", (Host("h", (tight, roomy), Link(1e10, 1e-6)),), None), Config(), rows=2000)
    shares = [replica.share for replica in plan.replicas]
    assert shares[0] < shares[1] and sum(shares) == 2000
    assert any("memory" in choice.bound or "does not fit" in choice.runner_up for choice in plan.choices)


def test_a_shortage_names_device_and_bytes() -> None:
    with pytest.raises(MemoryShortage, match=r"(?s)stage 0 on h0/0, h0/1 needs .* short.*hint: more micro-batches"):
        make_plan(chain(4, width=256), cluster((1e9, 1e9), memory=2**20), Config(), rows=8)


@pytest.mark.parametrize(
    ("config", "rows", "message"),
    [
        ({}, 1, r"the batch has 1, and 2 replicas x 1 micro-batch need 2"),
        ({"pipeline.num_micro_batch": 8}, 9, "need 16"),
        ({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 8}, 7, "need 8"),
    ],
)
def test_too_few_rows(config: dict[str, object], rows: int, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make_plan(chain(4), cluster((1e9, 1e9)), Config(config), rows=rows)


def test_a_wide_stage_needs_a_row_for_each_device() -> None:
    graph = chain(1, [(scope(0, 4, "wide"),)])
    with pytest.raises(BatchError, match="4 devices of a stage need 8"):
        make_plan(graph, cluster((1e9,) * 4), Config({"pipeline.num_micro_batch": 2}), rows=4)


def test_more_stages_than_devices_are_as_many_as_devices_and_the_plan_says_so() -> None:
    asked, two = ({"pipeline.num_micro_batch": 2, "pipeline.num_stages": count} for count in (5, 2))
    plan = make_plan(chain(8), cluster((1e9, 1e9)), Config(asked))
    assert plan.replicas == make_plan(chain(8), cluster((1e9, 1e9)), Config(two)).replicas
    assert any("5 stages on 2 devices: consecutive ones are merged" in choice.bound for choice in plan.choices)


def test_more_stages_with_chunks_than_devices_or_places_to_cut() -> None:
    chunks = {"pipeline.schedule": "interleaved", "pipeline.num_chunks": 2, "pipeline.num_micro_batch": 4}
    with pytest.raises(
        ConfigError, match=r"(?s)num_stages: 3 .* needs 3 devices of 2 stages each; there are 2.*hint: pipeline.num_stages: 2"
    ):
        make_plan(chain(8), cluster((1e9, 1e9)), Config(chunks | {"pipeline.num_stages": 3}))
    with pytest.raises(PlanError, match="it has 1 places to cut"):
        make_plan(chain(1), cluster((1e9,) * 4), Config({"pipeline.num_stages": 4}))


def test_left_over_devices_are_the_slowest_and_reported() -> None:
    plan = make_plan(chain(4), cluster((1e9, 3e9, 2e9)), Config(TWO_STAGES))
    assert plan.idle_devices == ("h0/0",)
    assert [choice.bound for choice in plan.choices if choice.subject == "idle devices"] == ["a replica takes 2 devices"]


def test_replicas_fill_a_host_first_or_are_alike() -> None:
    mixed = cluster((2e9, 2e9), (1e9, 1e9))
    for prefers, expected in ((True, [{"h0"}, {"h1"}]), (False, [{"h0", "h1"}, {"h0", "h1"}])):
        config = Config({**TWO_STAGES, "cluster.device_place_prefer_intra_node": prefers})
        plan = make_plan(chain(8, width=64), mixed, config, rows=12)
        hosts = [{name.split("/")[0] for stage in r.stages for name in stage.virtual_device.devices} for r in plan.replicas]
        assert hosts == expected
        assert "replicas grouped by" in next(c.runner_up for c in plan.choices if c.pass_name == "placement")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_h2", "recompute_early"])
def test_other_schedules_plan(schedule: str) -> None:
    plan = make_plan(chain(8, width=64), cluster((1e9, 1e9)), Config({**TWO_STAGES, "pipeline.schedule": schedule}), rows=8)
    assert plan.pipelines[0].schedule == schedule and plan.step_seconds > 0


@pytest.mark.parametrize(("schedule", "ranks"), [("interleaved", (0, 1, 0, 1)), ("aiao", (0, 1, 0, 1)), ("zb_v", (0, 1, 1, 0))])
def test_chunked_schedules_cut_more_stages(schedule: str, ranks: tuple[int, ...]) -> None:
    config = Config({**TWO_STAGES, "pipeline.schedule": schedule, "pipeline.num_chunks": 2, "pipeline.num_micro_batch": 4})
    plan = make_plan(chain(8, width=64), cluster((1e9, 1e9)), config, rows=8)
    assert plan.pipelines[0].stage_rank == ranks and len(plan.devices) == 2
    assert plan.pipelines[0].num_chunks == 2


def test_a_plan_survives_json_and_verifies() -> None:
    graph, there = chain(8, width=64), cluster((2e9, 1e9), (1e9, 1e9))
    plan = make_plan(graph, there, Config(TWO_STAGES), rows=12)
    again = from_json(Plan, to_json(plan))
    assert again == plan
    verify(again, graph, there)


def test_floating_ops_go_where_they_are_read() -> None:
    """Random noise made first and read last is made in the last stage, not sent through."""
    graph = Graph()
    value = x = graph.input("x", 64)
    graph.call("noise", "aten.rand_like.default", x, width=64, tags=("random",), grad=False)
    for index in range(4):
        value = graph.linear(f"layer{index}", value, width=64)
    graph.sum_loss(graph.call("noisy", "aten.mul.Tensor", value, "noise", width=64))
    plan = make_plan(graph.build(), cluster((1e9, 1e9)), Config(TWO_STAGES))
    assert "noise" in plan.replicas[0].stages[1].ops
    assert [edge.tensors for edge in plan.replicas[0].edges] == [("layer1",)]


@given(
    speeds=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    layers=st.integers(6, 12),
    num_stages=st.integers(1, 4),
    num_micro_batch=st.integers(1, 4),
    extra=st.integers(0, 9),
)
def test_every_row_and_every_op_is_planned(speeds: list[int], layers: int, num_stages: int, num_micro_batch: int, extra: int) -> None:
    num_stages = min(num_stages, len(speeds))
    config = Config({"pipeline.num_stages": num_stages, "pipeline.num_micro_batch": num_micro_batch})
    num_rows = len(speeds) // num_stages * num_micro_batch + extra
    graph = chain(layers, width=32)
    plan = make_plan(graph, cluster([speed * 1e9 for speed in speeds]), config, rows=num_rows)
    assert sum(replica.share for replica in plan.replicas) == num_rows
    assert plan.replica_rows(num_rows)[-1][1] == num_rows
    for replica, (start, stop) in zip(plan.replicas, plan.replica_rows(num_rows), strict=True):
        assert stop - start == replica.share >= num_micro_batch
        assert [name for stage in replica.stages for name in stage.ops] == [op.name for op in graph.ops if op.kind == "call"]
    assert len(plan.devices) + len(plan.idle_devices) == len(speeds)


def test_the_plan_for_the_rows_of_the_example() -> None:
    assert make_plan(chain(2), cluster((1e9,)), Config()).planned_rows == ROWS


def test_copies_of_a_nested_pipeline_keep_their_rows_from_stage_to_stage() -> None:
    """One copy on fast devices and one on slow ones; the last stage lies outside."""
    outer = scope(0, 2, "copies")
    graph = chain(3, [(outer, scope(1, 1, "front")), (outer, scope(2, 1, "middle")), (scope(3, 1, "tail"),)], width=64)
    hosts = Host("h", tuple(device(f"h/{i}", "h", flops) for i, flops in enumerate((3e9, 1e9, 3e9, 1e9, 9e9))), Link(1e10, 1e-9))
    plan = make_plan(graph, Cluster("c", (hosts,), None), Config(), rows=8)
    front, middle, tail = plan.replicas[0].stages
    assert front.shares == middle.shares == (6, 2) and tail.shares == (8,)


def test_one_wide_stage() -> None:
    """Scopes without counts share all devices in one stage; the rows of a micro-batch follow the devices' speeds."""
    graph = chain(2, [(scope(0, None),), (scope(1, None),)], width=64)
    plan = make_plan(graph, cluster((3e9, 1e9), (1e9,)), Config({"pipeline.num_micro_batch": 2}), rows=20)
    assert [stage.shares for stage in plan.replicas[0].stages] == [(6, 2, 2)]


def test_no_stage_is_made_of_ops_that_go_where_they_are_read() -> None:
    graph = Graph()
    x = graph.input("x")
    graph.call("mixed", "aten.matmul.default", x, x, flops=10**9, grad=False)  # needs no parameter, so it moves to its reader
    graph.sum_loss(graph.linear("second", graph.linear("first", "mixed")))
    plan = make_plan(graph.build(), cluster((1e9, 1e9)), Config(TWO_STAGES), rows=8)
    front, back = (set(stage.ops) for stage in plan.replicas[0].stages)
    assert {"mixed", "first"} <= front and "second" in back


def test_one_device_asks_for_no_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(graph: object) -> None:
        raise AssertionError("nothing is divided")

    monkeypatch.setattr("whale.estimate.prices.prices.discover", find)
    plan = make_plan(chain(4), cluster((1e9,)), Config({}))
    assert len(plan.devices) == 1 and not plan.batch_axes
