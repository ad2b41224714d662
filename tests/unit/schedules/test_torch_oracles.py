"""The orders against torch's own generators: a second opinion on what each schedule is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as oracle

from whale.estimate import ActionTimes, simulate
from whale.ir.schedule import COMPUTE, Kind, Schedule
from whale.schedules import build, count_in_flight

pytestmark = pytest.mark.slow

Orders = list[list[str]]


def ours(name: str, num_ranks: int, num_micro_batch: int, num_chunks: int = 1, group_size: int | None = None) -> Orders:
    schedule = build(name, num_ranks=num_ranks, num_micro_batch=num_micro_batch, num_chunks=num_chunks, group_size=group_size)
    return computations(schedule)


def computations(schedule: Schedule) -> Orders:
    return [[str(action) for action in actions if action.kind in COMPUTE] for actions in schedule.ranks]


def texts(actions: list[object]) -> list[str]:
    """Torch's actions as ours are written; its placeholders for waiting and its gradient reductions left out."""
    return [str(action) for action in actions if action is not None and "REDUCE" not in str(action)]


def single(generator: type, num_ranks: int, num_micro_batch: int) -> Orders:
    order = generator._get_pipeline_order(SimpleNamespace(_num_stages=num_ranks, _n_microbatches=num_micro_batch))  # type: ignore[attr-defined]
    return [texts(order[rank]) for rank in range(num_ranks)]


def multi(generator: type, num_ranks: int, num_micro_batch: int, num_chunks: int, **more: int) -> Orders:
    orders = []
    for rank in range(num_ranks):
        itself = SimpleNamespace(
            pp_group_size=num_ranks,
            _n_microbatches=num_micro_batch,
            n_local_stages=num_chunks,
            _stages=[None] * num_chunks,
            num_stages=num_ranks * num_chunks,
            rank=rank,
            **more,
        )
        orders.append(texts(generator._calculate_single_rank_operations(itself, rank)))  # type: ignore[attr-defined]
    return orders


@pytest.mark.parametrize("num_ranks", range(1, 6))
def test_gpipe(num_ranks: int) -> None:
    for num_micro_batch in range(1, 9):
        assert ours("gpipe", num_ranks, num_micro_batch) == single(oracle.ScheduleGPipe, num_ranks, num_micro_batch)


@pytest.mark.parametrize("num_ranks", range(1, 6))
def test_1f1b(num_ranks: int) -> None:
    # Its generator wants at least as many micro-batches as stages, and numbers the last stage's forwards from 1.
    for num_micro_batch in range(num_ranks, 11):
        theirs = single(oracle.Schedule1F1B, num_ranks, num_micro_batch)
        mine = ours("1f1b", num_ranks, num_micro_batch)
        assert mine[:-1] == theirs[:-1]
        last = num_ranks - 1
        assert mine[-1] == [f"{last}{kind}{i}" for i in range(num_micro_batch) for kind in "FB"]
        assert [text for text in theirs[-1] if "B" in text] == [text for text in mine[-1] if "B" in text]


@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_interleaved(num_ranks: int, num_chunks: int) -> None:
    compared = 0
    for num_micro_batch in range(1, 17):
        rounds = max(1, num_micro_batch // num_ranks)
        if num_micro_batch % rounds:
            continue
        group = num_micro_batch // rounds
        theirs = multi(oracle.ScheduleInterleaved1F1B, num_ranks, num_micro_batch, num_chunks, microbatches_per_round=group)
        assert ours("interleaved", num_ranks, num_micro_batch, num_chunks, group) == theirs
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_looped_breadth_first_is_all_in_all_out_with_the_newest_backward_first(num_ranks: int, num_chunks: int) -> None:
    num_micro_batch = 5
    theirs = multi(oracle.ScheduleLoopedBFS, num_ranks, num_micro_batch, num_chunks)
    half = num_micro_batch * num_chunks
    for mine, order in zip(ours("aiao", num_ranks, num_micro_batch, num_chunks), theirs, strict=True):
        assert mine[:half] == order[:half]
        blocks = [order[start : start + num_micro_batch] for start in range(half, 2 * half, num_micro_batch)]
        assert mine[half:] == [text for block in blocks for text in reversed(block)]


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_zb_v_is_no_slower_and_no_larger(num_ranks: int) -> None:
    costs = ActionTimes(1.0, 1.0, 1.0)
    for num_micro_batch in range(1, 20):
        schedule = build("zb_v", num_ranks=num_ranks, num_micro_batch=num_micro_batch)
        orders = multi(oracle.ScheduleZBVZeroBubble, num_ranks, num_micro_batch, 2)
        lines = [f"rank {rank}: {' '.join(order)}" for rank, order in enumerate(orders)]
        placement = " ".join(map(str, schedule.stage_rank))
        theirs = Schedule.parse("\n".join([f"schedule theirs, {num_micro_batch} micro-batches, stages on ranks {placement}", *lines]))
        assert simulate(schedule, costs).makespan <= simulate(theirs, costs).makespan
        assert all(mine <= other for mine, other in zip(count_in_flight(schedule), count_in_flight(theirs), strict=True))
        assert {action.kind for action in schedule.ranks[0]} >= {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
