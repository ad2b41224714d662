"""Rows and micro-batches of replicas that are not alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whale.ir.division import divide
from whale.ir.plan import Pipeline, Plan, Replica, Stage, VirtualDevice


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
