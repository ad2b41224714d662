"""Rows and micro-batches of replicas that are not alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whale.ir.division import divide
from whale.ir.plan import Pipeline, Plan, Replica, Stage, VirtualDevice, describe_degrees


def plan_of(replicas: list[tuple[int, int]]) -> Plan:
    """Replicas of one stage, each with a share of the rows and a number of micro-batches."""
    made = tuple(
        Replica(index, share, Pipeline("1f1b", count, (0,)), (Stage(0, ("t",), (), VirtualDevice((f"d{index}",)), (1,), ()),), ())
        for index, (share, count) in enumerate(replicas)
    )
    return Plan("m", "c", tuple(f"d{index}" for index in range(len(made))), (), (), made, (), 8)


plans = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=5).map(plan_of)


@given(plans, st.integers(0, 40))
def test_every_micro_batch_has_a_row(plan: Plan, more: int) -> None:
    num_rows = sum(pipeline.num_micro_batch for pipeline in plan.pipelines) + more
    pieces = [piece for replica in plan.replicas for piece in plan.micro_batch_rows(replica.index, num_rows)]
    assert len(pieces) == sum(pipeline.num_micro_batch for pipeline in plan.pipelines)
    assert [row for start, stop in pieces for row in range(start, stop)] == list(range(num_rows))
    assert all(start < stop for start, stop in pieces)


@given(plans, st.integers(1, 40))
def test_small_batches_have_fewer_micro_batches(plan: Plan, num_rows: int) -> None:
    fitting = plan.with_micro_batches_for(num_rows)
    counts = [pipeline.num_micro_batch for pipeline in fitting.pipelines]
    assert all(1 <= count <= own.num_micro_batch for count, own in zip(counts, plan.pipelines, strict=True))
    if num_rows < len(plan.replicas):
        assert set(counts) == {1}
        return
    if num_rows >= sum(pipeline.num_micro_batch for pipeline in plan.pipelines):
        assert fitting == plan
        return
    sizes = divide(num_rows, [replica.share for replica in plan.replicas], minimum=1)
    assert all(start < stop for replica in fitting.replicas for start, stop in fitting.micro_batch_rows(replica.index, num_rows))
    assert counts == [min(own.num_micro_batch, size) for own, size in zip(plan.pipelines, sizes, strict=True)]


def replica_of(index: int, stages: list[tuple[int, int]], chunks: int = 1) -> Replica:
    """A replica whose devices run stages of these parts of the rows and these widths of split groups, `chunks` of them each."""
    devices = [tuple(f"{index}.{rank}.{each}" for each in range(groups * split)) for rank, (groups, split) in enumerate(stages)]
    order = tuple(rank for _ in range(chunks) for rank in range(len(stages)))
    made = tuple(
        Stage(number, ("t",), (), VirtualDevice(devices[rank]), (1,) * stages[rank][0], (), split=stages[rank][1])
        for number, rank in enumerate(order)
    )
    return Replica(index, 1, Pipeline("1f1b", 1, order, num_chunks=chunks), made, ())


@given(*(st.integers(1, 4) for _ in range(5)))
def test_degrees_multiply_to_the_world_size(replicas: int, groups: int, ranks: int, split: int, chunks: int) -> None:
    text = describe_degrees([replica_of(index, [(groups, split)] * ranks, chunks) for index in range(replicas)])
    assert text == f"world size {replicas * groups * ranks * split} = DP {replicas * groups} x PP {ranks} x TP {split}"


def test_degrees_of_unlike_replicas_and_stages() -> None:
    assert describe_degrees([replica_of(0, [(1, 1)] * 2), replica_of(1, [(1, 1)] * 2), replica_of(2, [(1, 2)])]) == (
        "world size 6: replicas 0, 1 = DP 1 x PP 2 x TP 1; replica 2 = DP 1 x PP 1 x TP 2"
    )
    assert describe_degrees([replica_of(0, [(2, 1), (1, 4)])]) == "world size 6: replica 0 = PP 2, DP x TP of its stages 2 x 1, 1 x 4"
