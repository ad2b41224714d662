"""What a rank computes is told without its waits, once for each run, and nothing of what lies outside of runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from whale.ir.schedule import Action, Kind
from whale.runtime.recording.meter import Meter, StreamSum

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


@dataclass
class Stream:
    """A GPU's stream: the host records an event each millisecond, and the device comes to them later."""

    host: float = 0.0
    device: float = 0.0
    num_made: int = 0

    def event(self) -> Any:
        self.num_made += 1
        return Event(self)


@dataclass
class Event:
    stream: Stream
    at: float = 0.0

    def record(self) -> None:
        self.at, self.stream.host = self.stream.host, self.stream.host + 1.0

    def query(self) -> bool:
        return self.at < self.stream.device

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_a_gpu_is_read_when_it_has_come_to_the_end_and_its_events_are_used_again() -> None:
    stream, free = Stream(), list[Any]()
    for _ in range(3):
        found = StreamSum(free, stream.event)
        for sign in (-1, 1, -1, 1):
            found.add(sign)
        assert found.seconds() is None, "nobody waits for it"
        stream.device = stream.host
        assert found.seconds() == 2e-3
    assert stream.num_made == 4
