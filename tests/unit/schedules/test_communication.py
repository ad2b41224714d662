"""Where communication is put: around the computations that need it, and only between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.schedules.test_builders import schedules
from whale.errors import ScheduleError
from whale.ir.schedule import COMPUTE, POSTS, RECEIVES, SENDS, Schedule, format_actions
from whale.schedules import build, insert_communication, insert_recompute, verify


def chain(schedule: Schedule) -> list[tuple[int, int]]:
    return [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]


def rank(schedule: Schedule, number: int) -> str:
    return format_actions(schedule.ranks[number])


def waits_and_computations(schedule: Schedule, number: int) -> str:
    return format_actions(action for action in schedule.ranks[number] if action.kind in COMPUTE | RECEIVES)


def test_both_ends_of_an_edge() -> None:
    schedule = build("1f1b", num_ranks=3, num_micro_batch=1)
    talking = insert_communication(schedule, chain(schedule))
    assert rank(talking, 0) == "0F0 0SEND_F0 LOSS 1POST_B0 0RECV_B0 0B0 0SYNC STEP"
    assert rank(talking, 1) == "0POST_F0 1RECV_F0 1F0 1SEND_F0 LOSS 2POST_B0 1RECV_B0 1B0 1SYNC 1SEND_B0 STEP"
    assert rank(talking, 2) == "1POST_F0 2RECV_F0 2F0 LOSS 2B0 2SYNC 2SEND_B0 STEP"


def test_a_skip_alone_joins_stages_that_are_no_neighbours() -> None:
    talking = insert_communication(build("gpipe", num_ranks=3, num_micro_batch=1), [(0, 2)])
    assert rank(talking, 1) == "1F0 LOSS 1B0 1SYNC STEP"
    assert rank(talking, 2) == "0POST_F0 2RECV_F0 2F0 LOSS 2B0 2SYNC 2SEND_B0 STEP"


def test_no_communication_within_a_rank() -> None:
    schedule = build("zb_v", num_ranks=2, num_micro_batch=3)
    talking = insert_communication(schedule, [(1, 2)])
    assert not any(action.kind in SENDS | RECEIVES | POSTS for actions in talking.ranks for action in actions)
    verify(talking, [(1, 2)])


def test_weight_gradients_are_not_sent() -> None:
    talking = insert_communication(build("zb_h1", num_ranks=2, num_micro_batch=1), [(0, 1)])
    assert rank(talking, 1) == "0POST_F0 1RECV_F0 1F0 LOSS 1I0 1SEND_B0 1W0 1SYNC STEP"


def test_plain_recompute_awaits_the_gradient_and_early_recompute_does_not() -> None:
    plain = insert_recompute(build("1f1b", num_ranks=2, num_micro_batch=2))
    awaited = insert_communication(plain, [(0, 1)])
    assert waits_and_computations(awaited, 0) == "0F0 0F1 0RECV_B0 0R0 0B0 0RECV_B1 0R1 0B1"
    early = build("recompute_early", num_ranks=2, num_micro_batch=2)
    awaited = insert_communication(early, [(0, 1)])
    assert waits_and_computations(awaited, 0) == "0F0 0F1 0RECV_B0 0R0 0B0 0R1 0RECV_B1 0B1"


def test_early_marks_go_where_no_gradient_comes() -> None:
    talking = insert_communication(build("recompute_early", num_ranks=2, num_micro_batch=2), [])
    assert not any(action.kind in RECEIVES for actions in talking.ranks for action in actions)


def test_recompute_of_some_stages_only() -> None:
    some = insert_recompute(build("1f1b", num_ranks=2, num_micro_batch=1), stages=[0])
    assert [rank(some, number) for number in (0, 1)] == ["0F0 0R0 0B0 0SYNC STEP", "1F0 1B0 1SYNC STEP"]
    assert insert_recompute(some, stages=[0]) == some


@given(schedules(), st.data())
def test_any_edges(schedule: Schedule, data: st.DataObject) -> None:
    stages = range(schedule.num_stages)
    pairs = [(source, target) for source in stages for target in stages if source < target]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)) if pairs else []
    edges = sorted({*chain(schedule), *edges})
    talking = insert_communication(schedule, edges)
    verify(talking, edges)
    assert insert_communication(talking, edges) == talking
    assert Schedule.parse(str(talking)) == talking


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 3), (-1, 1)])
def test_edges_that_are_none(edge: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="to a later one of 3"):
        insert_communication(build("1f1b", num_ranks=3, num_micro_batch=1), [edge])


def test_ranks_with_different_numbers_of_stages() -> None:
    text = """
    schedule custom, 2 micro-batches, stages on ranks 0 1 1
    rank 0: 0F0 0F1 0B0 0B1 0SYNC STEP
    rank 1: 1F0 2F0 2B0 1B0 1F1 2F1 2B1 2SYNC 1B1 1SYNC STEP
    """
    schedule = Schedule.parse(text)
    verify(schedule)
    talking = insert_communication(schedule, chain(schedule))
    verify(talking, chain(schedule))
    assert "2RECV" not in str(talking) and "1RECV_F0" in str(talking)
    assert replace(talking, ranks=schedule.ranks) == schedule
