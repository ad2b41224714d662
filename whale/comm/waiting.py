"""Waiting for communication with a limit, and saying who and what was waited for when it runs out.

Where the host carries messages (Gloo), it waits, no longer than the limit. Where a device does (NCCL), a wait only orders
the device's streams and returns at once: the host runs ahead. The limit is then kept by a monitor beside it, which looks
at what has been waited for; the next wait, or the end of the process by NCCL's own watchdog, tells what it found.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from whale.comm.lines import Lines, last_words
from whale.errors import RuntimeFault
from whale.units import listed

LOOK_SECONDS = 1.0
"""How often the monitor looks."""


@dataclass(frozen=True)
class Launched:
    """Communication that was started.

    Attributes:
        work: torch's.
        blocks_host: whether waiting for it is the host's; else a device's.
        finish: what the host does with what has come, once it has waited for it.
    """

    work: dist.Work
    blocks_host: bool
    finish: Callable[[], object] | None = None


@dataclass(frozen=True)
class _Watched:
    """What a device waits for: whether it is past that, since when it was asked to, for what, and with whom."""

    is_past: Callable[[], bool]
    since: float
    action: str
    ranks: tuple[int, ...]


@dataclass
class Waits:
    """How long this process waits for its peers.

    Attributes:
        timeout: the longest that any wait may take.
        lines: to the peers; given up where a wait fails.
    """

    timeout: timedelta
    lines: Lines = field(default_factory=Lines)
    _watched: deque[_Watched] = field(default_factory=deque)
    _monitor: threading.Thread | None = None
    _fault: RuntimeFault | None = None
    _progress: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, launched: Launched | None, action: str, ranks: Sequence[int]) -> None:
        """Waits for one piece of communication; where a device does, has it wait.

        Args:
            launched: what to wait for; None is done already.
            action: what it is for (``1RECV_F3``).
            ranks: the other ranks in it.

        Raises:
            RuntimeFault: a peer died, or the limit passed, in this wait or in an earlier one of the device.
        """
        if self._fault is not None:
            raise self._fault
        if launched is None:
            return
        try:
            if launched.blocks_host:
                launched.work.wait(self.timeout)
                if launched.finish is not None:
                    launched.finish()
                return
            launched.work.wait()
        except (RuntimeError, dist.DistError) as error:
            raise self._failed(action, ranks, error) from error
        with self._lock:
            self._watched.append(_Watched(_past(launched.work), time.monotonic(), action, tuple(ranks)))
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._keep_looking, name="whale waits", daemon=True)
                self._monitor.start()

    @contextmanager
    def speaking(self, action: str, ranks: Sequence[int]) -> Iterator[None]:
        """Turns what a backend raises inside into the error that says what was being done, and with whom.

        Raises:
            RuntimeFault: the communication inside failed.
        """
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise self._failed(action, ranks, error) from error

    def _failed(self, action: str, ranks: Sequence[int], error: BaseException) -> RuntimeFault:
        """The fault of a wait. This rank cannot go on either, so it hangs up."""
        said = last_words()
        self.lines.hang_up()
        return fault(action, ranks, self.timeout, error, said)

    def look(self, now: float) -> RuntimeFault | None:
        """Forgets what is done, in the order in which it was waited for; the fault if a rank has failed, or the first is overdue.

        The host runs ahead of the device, so what stands in the queue waits for its turn first: the limit of the first counts
        from when it was asked for, or from when the one before it was seen done, whichever is later.
        """
        while self._watched and self._watched[0].is_past():
            self._watched.popleft()
            self._progress = now
        if self._watched:
            first, said = self._watched[0], last_words()
            if said is not None or max(first.since, self._progress) + self.timeout.total_seconds() < now:
                self._fault = fault(first.action, first.ranks, self.timeout, TimeoutError("the device still waits"), said)
        return self._fault

    def _keep_looking(self) -> None:
        """Ends where nothing is left to look at; the next wait starts another."""
        pause = threading.Event()
        while self.look(time.monotonic()) is None:
            with self._lock:
                if not self._watched:
                    self._monitor = None
                    return
            pause.wait(LOOK_SECONDS)
        print(
            f"RuntimeFault: {self._fault}", file=sys.stderr, flush=True
        )  # the host may be held up by the device, and never come to raise it


def _past(work: dist.Work) -> Callable[[], bool]:
    """Tells whether a device is past a wait that it was just asked for.

    An event behind the wait tells it: who asks the work itself keeps hold of what it has received until the monitor looks.
    """
    if not torch.cuda.is_available():
        return work.is_completed
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query


_LEFT = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "socket closed")
_LATE = ("timed out", "timeout", "still waits")


def fault(action: str, ranks: Sequence[int], timeout: timedelta, error: BaseException, said: str | None = None) -> RuntimeFault:
    """The error for communication that did not complete, in our words: what the backend says is its cause.

    Args:
        action: what was being done.
        ranks: with whom.
        timeout: how long it might have taken.
        error: the backend's.
        said: by the rank that failed first, if one has said anything.
    """
    text = f"{type(error).__name__} {error}".lower()
    if said is not None:
        reason, hint = said, "that rank's own output says more"
    elif any(word in text for word in _LEFT):
        reason, hint = "a rank has left: its process has ended, or its engine was closed", "that rank's own output says why"
    elif any(word in text for word in _LATE):
        seconds = f"{timeout.total_seconds():g}"
        reason = f"nothing has come within communication.timeout_seconds ({seconds})"
        hint = "that rank's own output says what it does; raise the limit if it is only slow"
    else:
        reason, hint = f"the backend failed ({type(error).__name__})", "that rank's own output says more; WHALE_DEBUG=1 shows the cause"
    return RuntimeFault(f"{action} with {listed('rank', ranks)} did not complete: {reason}", hint=hint)
