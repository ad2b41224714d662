"""Colocated stages: a place's actions become those of its stages, and the result is a correct schedule."""

from __future__ import annotations

import pytest

from whale.ir.schedule import format_actions
from whale.schedules import build, count_in_flight, insert_communication, verify
from whale.schedules.of_plan import expand, places


def test_places_are_runs_of_one_rank() -> None:
    assert places((0, 0, 1, 2, 2, 0)) == ((0, 1), (2,), (3, 4), (5,))


def test_two_stages_on_one_device() -> None:
    schedule = expand(build("1f1b", num_ranks=1, num_micro_batch=2), (0, 0))
    assert format_actions(schedule.ranks[0]) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 1SYNC 0B1 0SYNC STEP"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "recompute_early"])
def test_every_order_stays_correct(name: str) -> None:
    schedule = expand(build(name, num_ranks=2, num_micro_batch=4), (0, 0, 1, 1))
    edges = {(0, 1), (1, 2), (2, 3), (0, 3)}
    verify(insert_communication(schedule, edges), edges)
    assert schedule.peak_in_flight == count_in_flight(schedule)
