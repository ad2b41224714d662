"""Each way in which a schedule can be wrong, and that all of them are reported at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.schedules.test_builders import schedules
from whale.errors import ScheduleError
from whale.ir.schedule import COMPUTE, Kind, Schedule
from whale.schedules import build, insert_communication, verify


def two_ranks(first: str, second: str, *, micro_batches: int = 2, promise: str = "") -> Schedule:
    head = f"schedule custom, {micro_batches} micro-batches, stages on ranks 0 1{promise}"
    return Schedule.parse(f"{head}\nrank 0: {first}\nrank 1: {second}")


GOOD = "0F0 0F1 0B0 0B1 0SYNC STEP", "1F0 1B0 1F1 1B1 1SYNC STEP"
TALKING = (
    "0F0 0SEND_F0 0F1 0SEND_F1 1POST_B0 0RECV_B0 0B0 LOSS 1POST_B1 0RECV_B1 0B1 0SYNC STEP",
    "0POST_F0 1RECV_F0 1F0 0POST_F1 1B0 1SEND_B0 1RECV_F1 1F1 LOSS 1B1 1SYNC 1SEND_B1 STEP",
)


def message(first: str, second: str, **more: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify(two_ranks(first, second, **more))
    return str(caught.value)


def test_the_good_ones_are_good() -> None:
    verify(two_ranks(*GOOD))
    verify(two_ranks(*TALKING))
    verify(two_ranks(*TALKING), [(0, 1)])


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("0F1 ", "", "0F1 is missing on rank 0"),
        ("0B1 ", "", "0B1 is missing on rank 0"),
        ("0F1 ", "0F1 0F1 ", "0F1 occurs twice on rank 0: actions 2 and 3"),
        ("0F1 ", "0F1 1F1 ", "1F1 (action 3 of rank 0) is on the wrong rank: stage 1 is on rank 1"),
        ("0F1 ", "0F1 0F2 ", "0F2 (action 3 of rank 0) is of a micro-batch that does not exist (micro-batches: 2)"),
        ("0F1 ", "0F1 7F1 ", "7F1 (action 3 of rank 0) is of a stage that does not exist (stages: 2)"),
        ("0B0 ", "0W0 0I0 ", "0W0 (action 3 of rank 0) comes before 0I0 (action 4)"),
        ("0B0 ", "0I0 ", "0W0 is missing on rank 0"),
        ("0B0 ", "0I0 0W0 0B0 ", "the backward of stage 0, micro-batch 0 occurs twice on rank 0: whole (0B0) and in parts"),
        ("0B0 ", "0B0 0R0 ", "0B0 (action 3 of rank 0) comes before 0R0 (action 4)"),
        ("0F0 ", "0R0 0F0 ", "0R0 (action 1 of rank 0) comes before 0F0 (action 2)"),
        ("0F0 0F1 0B0", "0B0 0F1 0F0", "0B0 (action 1 of rank 0) comes before 0F0 (action 3)"),
        ("0SYNC ", "", "0SYNC is missing on rank 0"),
        ("0B1 0SYNC", "0SYNC 0B1", "0SYNC (action 4 of rank 0) comes before 0B1 (action 5)"),
        ("0SYNC", "0SYNC 0SYNC", "0SYNC occurs twice on rank 0: actions 5 and 6"),
        (" STEP", "", "STEP is missing on rank 0"),
        ("0SYNC STEP", "STEP 0SYNC", "STEP (action 5 of rank 0) is not the last of its 6 actions"),
    ],
)
def test_faults_of_one_rank(old: str, new: str, wanted: str) -> None:
    assert old in GOOD[0]
    assert wanted in message(GOOD[0].replace(old, new, 1), GOOD[1])


@pytest.mark.parametrize(
    ("rank", "old", "new", "wanted"),
    [
        (0, "0SEND_F1 ", "", "0SEND_F1 is missing on rank 0"),
        (1, "1RECV_F1 ", "", "1RECV_F1 is missing on rank 1"),
        (1, "1SEND_B0 ", "", "1SEND_B0 is missing on rank 1"),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 (action 1 of rank 0) comes before 0F0 (action 2)"),
        (1, "1RECV_F1 1F1", "1F1 1RECV_F1", "1F1 (action 7 of rank 1) comes before 1RECV_F1 (action 8)"),
        (0, "0RECV_B0 0B0", "0B0 0RECV_B0", "0B0 (action 6 of rank 0) comes before 0RECV_B0 (action 7)"),
        (1, "1B0 1SEND_B0", "1SEND_B0 1B0", "1SEND_B0 (action 5 of rank 1) comes before 1B0 (action 6)"),
        (0, "1POST_B0 ", "", "1POST_B0 is missing on rank 0"),
        (0, "1POST_B0 ", "0POST_F0 ", "0POST_F0 (action 5 of rank 0) is on the rank of stage 0 itself"),
        (1, "0POST_F1 ", "0POST_F1 0POST_B0 ", "0POST_B0 (action 5 of rank 1) receives along an edge that is not between ranks"),
        (1, "0POST_F0 1RECV_F0", "1RECV_F0 0POST_F0", "1RECV_F0 (action 1 of rank 1) comes before 0POST_F0 (action 2)"),
        (0, "LOSS ", "", "LOSS is missing on rank 0"),
        (1, "1SYNC 1SEND_B1", "1SEND_B1 1SYNC", "1SEND_B1 is between 1B1 and 1SYNC on rank 1, where buckets start"),
        (0, "0F0 ", "0RECV_F0 0F0 ", "0RECV_F0 (action 1 of rank 0) receives along an edge that is not between ranks"),
        (0, "0F0 0SEND_F0 0F1 0SEND_F1", "0F0 0F1 0SEND_F1 0SEND_F0", "meets 0SEND_F1 (action 3 of rank 0): message 1 of that channel"),
        (0, "0SEND_F1 1POST_B0", "1POST_B0 0SEND_F1", "1POST_B0 (action 4 of rank 0) waits for rank 1, which stays at 0POST_F1"),
    ],
)
def test_faults_of_communication(rank: int, old: str, new: str, wanted: str) -> None:
    assert old in TALKING[rank]
    lines = list(TALKING)
    lines[rank] = lines[rank].replace(old, new, 1)
    assert wanted in message(*lines)


def test_communication_is_asked_for_with_edges() -> None:
    with pytest.raises(ScheduleError, match="0SEND_F0 is missing on rank 0"):
        verify(two_ranks(*GOOD), [(0, 1)])
    verify(two_ranks(*GOOD), [])


def test_deadlock_names_who_is_stuck_behind_what() -> None:
    told = message("0F0 0B0 0F1 0B1 0SYNC STEP", "1F0 1F1 1B0 1B1 1SYNC STEP")
    assert "deadlock: 0B0 (action 2 of rank 0) waits for 1B0, which comes after 1F1 on rank 1, itself stuck" in told
    assert "deadlock: 1F1 (action 2 of rank 1) waits for 0F1, which comes after 0B0 on rank 0, itself stuck" in told


def test_deadlock_within_a_rank() -> None:
    text = "schedule custom, 1 micro-batches, stages on ranks 0 0\nrank 0: 1F0 0F0 1B0 0B0 0SYNC 1SYNC STEP"
    with pytest.raises(ScheduleError, match=r"1F0 \(action 1 of rank 0\) waits for 0F0, which comes later on the same rank"):
        verify(Schedule.parse(text))


def test_broken_promise_of_memory() -> None:
    told = message(*GOOD, promise=", peak in flight 1 1")
    assert told == "rank 0 holds more activations at once than promised (2, promised 1)"


def test_a_promise_for_each_rank_or_none() -> None:
    assert "1 figures for 2 ranks" in message(*GOOD, promise=", peak in flight 1")


def test_a_stage_on_a_rank_that_is_not_there() -> None:
    with pytest.raises(ScheduleError, match="stage 1 is on rank 1, but there are 1 ranks"):
        verify(Schedule.parse("schedule custom, 1 micro-batches, stages on ranks 0 1\nrank 0: 0F0"))


def test_all_faults_at_once_with_their_places() -> None:
    schedule = two_ranks(GOOD[0].replace("0F1 ", ""), GOOD[1].replace("1B1 ", "1B0 "))
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, places=("s.txt:2", "s.txt:3"))
    told = str(caught.value)
    for wanted in ("3 faults", "0F1 is missing on rank 0\n  at s.txt:2", "1B1 is missing on rank 1\n  at s.txt:3", "1B0 occurs twice"):
        assert wanted in told


@given(schedules(), st.data())
def test_one_lost_or_doubled_action_is_found_and_named(schedule: Schedule, data: st.DataObject) -> None:
    schedule = insert_communication(schedule, [(stage, stage + 1) for stage in range(schedule.num_stages - 1)])
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    actions = list(schedule.ranks[rank])
    at = data.draw(st.integers(0, len(actions) - 1))
    lost = actions[at]
    doubled = data.draw(st.booleans())
    actions[at : at + 1] = [lost, lost] if doubled else []
    broken = Schedule(
        schedule.name, schedule.num_micro_batch, schedule.stage_rank, (*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :])
    )
    edges = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    if not doubled and (lost.kind is Kind.RECOMPUTE or (lost.kind is Kind.LOSS and schedule.num_ranks == 1)):
        verify(broken, edges)  # a stage may recompute what it likes, and a rank that is alone asks nobody for the loss
        return
    with pytest.raises(ScheduleError) as caught:
        verify(broken, edges)
    assert str(lost) in str(caught.value) or (
        lost.kind in COMPUTE and f"stage {lost.stage}, micro-batch {lost.micro_batch}" in str(caught.value)
    )
    assert ("twice" if doubled else "missing") in str(caught.value)


def test_1f1b_order_of_messages_is_agreed_for_every_pair_of_stages() -> None:
    schedule = build("interleaved", num_ranks=3, num_micro_batch=6, num_chunks=2)
    edges = [(stage, stage + 1) for stage in range(5)] + [(0, 4), (1, 3)]
    verify(insert_communication(schedule, edges), edges)
