"""What a rank computes is told without its waits, once for each run, and nothing of what lies outside of runs."""

from __future__ import annotations

from itertools import count

import torch

from whale.ir.schedule import Action, Kind
from whale.runtime.recording.meter import Meter

F0, SEND = Action(Kind.FORWARD, 0, 0), Action(Kind.SEND_FORWARD, 0, 0)


def meter() -> Meter:
    """One whose clock ticks at each look."""
    ticks = count()
    return Meter(torch.device("cpu"), lambda: float(next(ticks)))


def test_a_pass_counts_without_the_waits_inside_it() -> None:
    watch = meter()
    watch.run_begins()
    for _ in range(2):
        watch.begin(F0)  # at 0 and 4
        with watch.waiting("parts"), watch.waiting("all ranks"):  # from 1 to 2: one wait inside another
            pass
        watch.end()  # at 3 and 7
    watch.run_ends()
    assert watch.busy_seconds() == 2 * (3 - 1)
    assert watch.busy_seconds() == 0, "each run is told once"


def test_what_is_no_pass_does_not_count() -> None:
    watch = meter()
    watch.begin(F0)  # of an evaluation
    with watch.waiting("parts"):
        watch.end()
    watch.run_begins()
    watch.begin(SEND)
    with watch.waiting("gradients"):
        watch.end()
    watch.begin(F0)
    watch.end()
    watch.run_ends()
    assert watch.busy_seconds() == 1


def test_a_run_that_fails_is_not_told() -> None:
    watch = meter()
    watch.run_begins()
    watch.begin(F0)
    watch.run_begins()
    watch.begin(F0)
    watch.end()
    watch.run_ends()
    assert watch.busy_seconds() == 1


def test_the_newest_of_several_runs_is_told() -> None:
    watch = meter()
    for num_passes in (1, 3):
        watch.run_begins()
        for _ in range(num_passes):
            watch.begin(F0)
            watch.end()
        watch.run_ends()
    assert watch.busy_seconds() == 3
