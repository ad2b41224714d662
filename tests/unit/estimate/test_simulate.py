"""The event simulation: transfers, synchronisation, unlike stages, communication, refusals."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.schedules.test_builders import schedules
from whale.errors import ConfigError, ScheduleError
from whale.estimate import ActionTimes, bubble, bubble_rate, simulate
from whale.estimate.events.drawing import draw
from whale.ir.schedule import COMPUTE, Schedule
from whale.ir.timeline import Timeline
from whale.schedules import build, forward_only, insert_communication, insert_recompute, verify


def spans(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(span.action), span.start, span.end) for span in timeline.ranks[rank]]


def test_transfers_delay_and_occupy_nobody() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_micro_batch=1), ActionTimes(1, 2, transfer=10))
    assert spans(timeline, 0) == [("0F0", 0, 1), ("0B0", 24, 26)]
    assert spans(timeline, 1) == [("1F0", 11, 12), ("1B0", 12, 14)]
    assert (timeline.makespan, bubble(timeline), bubble_rate(timeline)) == (26, 23, 23 / 26)


def test_no_transfer_within_a_rank() -> None:
    schedule = build("zb_v", num_ranks=1, num_micro_batch=1)
    assert simulate(schedule, ActionTimes(1, 1, 1, transfer=10)).makespan == 6


def test_unlike_stages_and_skips() -> None:
    schedule = build("gpipe", num_ranks=3, num_micro_batch=1)
    timeline = simulate(schedule, ActionTimes((1, 5, 1), (1, 5, 1), (0.5, 0, 0)), edges=[(0, 1), (0, 2)])
    assert spans(timeline, 2) == [("2F0", 1, 2), ("2B0", 2, 3)]  # it does not need stage 1
    assert spans(timeline, 0)[1] == ("0B0", 11, 12.5)


def test_recompute_waits_for_the_gradient_in_plain_order_only() -> None:
    costs = ActionTimes(1, 2, recompute=1)
    plain = simulate(insert_recompute(build("1f1b", num_ranks=2, num_micro_batch=1)), costs)
    early = simulate(build("recompute_early", num_ranks=2, num_micro_batch=1), costs)
    assert spans(plain, 0)[1:] == [("0R0", 5, 6), ("0B0", 6, 8)]
    assert spans(early, 0)[1:] == [("0R0", 1, 2), ("0B0", 5, 7)]


def test_synchronisations_of_a_rank_follow_each_other() -> None:
    timeline = simulate(build("aiao", num_ranks=1, num_micro_batch=1, num_chunks=2), ActionTimes(1, 1, sync=(3, 2)))
    assert [(str(span.action), span.start, span.end) for span in timeline.syncs[0]] == [("1SYNC", 3, 5), ("0SYNC", 5, 8)]
    assert (timeline.makespan, timeline.exposed_sync, bubble(timeline)) == (8, 4, 0)


def test_forward_only() -> None:
    timeline = simulate(forward_only(2, 3, (0, 1)), ActionTimes(1, 0))
    assert (timeline.makespan, timeline.peak_in_flight) == (4, (0, 0))


@given(schedules(), st.floats(0, 3), st.floats(0, 5))
def test_inserted_communication_changes_no_time(schedule: Schedule, transfer: float, sync: float) -> None:
    costs = ActionTimes(1.0, 1.5, 0.75, 1.0, sync, transfer)
    talking = insert_communication(schedule, [(stage, stage + 1) for stage in range(schedule.num_stages - 1)])
    assert simulate(talking, costs) == simulate(schedule, costs)


@given(schedules())
def test_every_computation_once_and_no_two_at_once(schedule: Schedule) -> None:
    timeline = simulate(schedule, ActionTimes(1.0, 1.5, 0.75, 0.5))
    for actions, found in zip(schedule.ranks, timeline.ranks, strict=True):
        assert [span.action for span in found] == [action for action in actions if action.kind in COMPUTE]
        assert all(before.end <= after.start for before, after in pairwise(found))


@pytest.mark.slow
def test_a_large_schedule() -> None:
    schedule = build("interleaved", num_ranks=64, num_micro_batch=512, num_chunks=4)
    verify(schedule)
    assert bubble(simulate(schedule, ActionTimes(1, 2))) == 63 * 3


def test_refusals() -> None:
    schedule = build("1f1b", num_ranks=2, num_micro_batch=1)
    with pytest.raises(ConfigError, match="3 figures for 2 stages; give one, or one per stage"):
        simulate(schedule, ActionTimes((1, 2, 3), 1))
    with pytest.raises(ConfigError, match="transfer: time -1 is negative"):
        simulate(schedule, ActionTimes(1, 1, transfer=-1))
    with pytest.raises(ConfigError, match="forward: time nan is negative or not finite"):
        simulate(schedule, ActionTimes(float("nan"), 1))
    stuck = Schedule.parse("schedule s, 1 micro-batches, stages on ranks 0 1\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0")
    with pytest.raises(ScheduleError, match="0B0 on rank 0 waits for 1B0"):
        simulate(stuck, ActionTimes(1, 1))


def test_drawing() -> None:
    lines = draw(simulate(build("1f1b", num_ranks=2, num_micro_batch=2), ActionTimes(1, 2)))
    assert lines == ["rank 0 |F0 F1       B0---    B1---", "rank 1 |   F0 B0--- F1 B1---"]


def test_drawing_of_synchronisation_and_several_stages() -> None:
    lines = draw(simulate(build("aiao", num_ranks=1, num_micro_batch=1, num_chunks=2), ActionTimes(1, 1, sync=2)))
    assert lines == ["rank 0 |0F0 1F0 1B0 0B0", "  sync |            1SYNC-- 0SYNC--"]


def test_drawing_of_nothing() -> None:
    assert draw(simulate(build("1f1b", num_ranks=1, num_micro_batch=1), ActionTimes(0, 0))) == ["rank 0 |"]


@pytest.mark.slow
def test_torch_is_left_out() -> None:
    code = "import sys, whale.schedules, whale.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
