"""Compute time of this rank in each step: the passes without the waits inside them.

    F ---------- [wait] ----- |        busy: time between the ends of passes, less time between the ends of waits

On a GPU the times are events in its stream, which the host reads in a later step, once the GPU has passed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch

from whale.ir.schedule import COMPUTE, Action
from whale.runtime.program.watch import Watch

MOST_UNREAD = 8
"""Most runs that a GPU has not finished; older ones are dropped."""

_NOTHING = nullcontext()


class BusySum(Protocol):
    """A sum of signed times."""

    def add(self, sign: int) -> None:
        """Adds the current time."""

    def seconds(self) -> float | None:
        """The sum; None if the device has not passed the last time yet."""


class HostSum:
    """Times of the host, for a CPU."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._seconds = clock, 0.0

    def add(self, sign: int) -> None:
        self._seconds += sign * self._clock()

    def seconds(self) -> float | None:
        return self._seconds


class StreamSum:
    """Times in a GPU's current stream.

    Args:
        free: events to reuse; those of this sum are returned when they are read.
        make: creates an event.
    """

    def __init__(self, free: list[torch.cuda.Event], make: Callable[[], torch.cuda.Event]) -> None:
        self._free, self._make = free, make
        self._marks: list[tuple[torch.cuda.Event, int]] = []

    def add(self, sign: int) -> None:
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._marks.append((event, sign))

    def seconds(self) -> float | None:
        if not self._marks:
            return 0.0
        if not self._marks[-1][0].query():  # type: ignore[no-untyped-call]
            return None
        first = self._marks[0][0]
        found = sum(sign * float(first.elapsed_time(event)) for event, sign in self._marks[1:]) / 1e3
        self._free += [event for event, _ in self._marks]
        self._marks.clear()
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass
class _Pause(AbstractContextManager[None]):
    """A wait inside a pass; may be nested."""

    meter: Meter
    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.meter.mark(1)

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.meter.mark(-1)


@dataclass(eq=False)
class Meter(Watch):
    """Sums the compute time of training runs."""

    device: torch.device
    clock: Callable[[], float] = perf_counter  # of the host, in seconds
    _sum: BusySum | None = field(default=None, init=False)
    _is_inside: bool = field(default=False, init=False)
    _unread: deque[BusySum] = field(default_factory=lambda: deque(maxlen=MOST_UNREAD), init=False)
    _free: list[torch.cuda.Event] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._pause = _Pause(self)

    def run_begins(self) -> None:
        self._sum = StreamSum(self._free, _event) if self.device.type == "cuda" else HostSum(self.clock)
        self._is_inside, self._pause.depth = False, 0

    def run_ends(self) -> None:
        if self._sum is not None:
            self._unread.append(self._sum)
            self._sum = None

    def busy_seconds(self) -> float:
        found = 0.0
        while self._unread and (seconds := self._unread[0].seconds()) is not None:
            found = seconds
            self._unread.popleft()
        return found

    def mark(self, sign: int) -> None:
        """Adds the current time to the current run."""
        if self._sum is not None:
            self._sum.add(sign)

    def begin(self, action: Action) -> None:
        if self._sum is not None and action.kind in COMPUTE:
            self._is_inside = True
            self._sum.add(-1)

    def end(self) -> None:
        if self._is_inside and self._sum is not None:
            self._sum.add(1)
            self._is_inside = False

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return self._pause if self._is_inside else _NOTHING
