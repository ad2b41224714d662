"""Waits for communication with a time limit, and errors that say what was waited for, with whom, and why a rank failed.

With Gloo the host waits, no longer than the limit. With NCCL a wait only orders streams and returns at once, and the host runs
ahead. A monitor thread then keeps the limit for what has been waited for; the next wait raises what it found. NCCL's own limit is
longer, since its watchdog ends the process. The host may be blocked by the device, which waits for a lost rank: so the monitor aborts
the communicators. Then the device goes on with whatever lies in its buffers, and nothing that it computes from then on is to be used.

A rank that fails writes the reason to the store that all ranks share and closes its connections, so that nobody waits for it. The
first rank to write is the cause; ranks that fail because of it write nothing. Gloo has no call that closes a connection, but a
receive that times out closes all connections of its group, and the other ends notice: so `close_all` receives, with a tiny limit,
what nobody sends. A rank that loses a connection closes its own too, so that the news reaches ranks without a connection to the
first. NCCL closes nothing; there the monitor of `Waits` reads the store.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from whale.errors import RuntimeFault
from whale.units import listed


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """The backend (``gloo``, ``nccl``) of a group for tensors of a device; None if it has none. An imagined world counts as Gloo."""
    served = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl", for all devices
    found = dict(pair.split(":") for pair in served.split(",")).get(device.type)
    return "gloo" if found == "fake" else found


def blocks_host(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a wait for tensors of a device blocks the host; with NCCL it blocks the device's stream."""
    return device.type == "cpu" or backend_of(device, group) != "nccl"


_WORDS = "whale/last words"
_ENDED = "whale/ends in an error"
_TAG = 0x5EA  # of a message that is never sent
_MAX_LENGTH = 300

LINGER_SECONDS = 3.0
"""How long a failed rank waits for the others to report their errors: launchers kill all ranks once one has ended."""

NCCL_FACTOR = 2
"""NCCL's own limit of a wait, by the limit of `Waits`."""

LISTEN_SECONDS = 0.02
"""Its polling interval."""


_DESTROYED = (KeyError, TypeError, ValueError)
"""What a group raises that the main thread has destroyed meanwhile."""


@dataclass
class Lines:
    """The process groups through which this process communicates, besides the world's own."""

    _groups: list[dist.ProcessGroup] = field(default_factory=list)

    def add(self, group: dist.ProcessGroup) -> None:
        self._groups.append(group)

    def remove(self, group: dist.ProcessGroup) -> None:
        """Before the group is destroyed."""
        if group in self._groups:
            self._groups.remove(group)

    def abort(self) -> None:
        """Ends what all NCCL communicators do, on the device too."""
        cuda = torch.device("cuda")
        backends: list[Any] = [group._get_backend(cuda) for group in self._over("nccl", cuda)]
        for first in backends[:1]:  # together: one after another they could wait for each other
            first._group_start()
            for backend in backends:
                backend.abort()
            first._group_end()

    def close_all(self) -> None:
        """Closes all Gloo connections: a rank that waits at the other end fails at once."""
        for group in self._over("gloo", torch.device("cpu")):
            with suppress(*_DESTROYED):
                _close(group)

    def _over(self, backend: str, device: torch.device) -> list[dist.ProcessGroup]:
        """The groups, the world's too, in which a backend carries what is on a device."""
        found = []
        for group in (dist.group.WORLD, *self._groups) if dist.is_initialized() else ():
            with suppress(*_DESTROYED):
                if group is not None and backend_of(device, group) == backend:
                    found.append(group)
        return found


def _close(group: dist.ProcessGroup) -> None:
    """Closes all connections of a group. With a peer that has closed its own, the receive fails at once and closes none: try the next."""
    for peer in (rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()):
        try:
            work = dist.irecv(torch.empty(1, dtype=torch.uint8), peer, group=group, tag=_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except (RuntimeError, dist.DistError) as error:  # expected: nothing comes
            if any(word in str(error).lower() for word in _LATE):
                return


def report_failure(error: BaseException) -> None:
    """Leaves the reason why this rank fails, if it is the first to fail."""
    first = (str(error).splitlines() or [""])[0][:_MAX_LENGTH]
    said = f"rank {dist.get_rank()} has failed: {type(error).__name__}" + (f": {first}" if first else "")
    with suppress(RuntimeError, dist.DistError):  # the rank that keeps the store has ended
        _store().compare_set(_WORDS, "", said)


def end_together(most_seconds: float) -> None:
    """Waits, once and no longer than `most_seconds`, until all ranks end in an error and have printed theirs."""
    if most_seconds <= 0:
        return
    with suppress(RuntimeError, dist.DistError):  # the rank that keeps the store has ended
        store, until = _store(), time.monotonic() + most_seconds
        ranks = [f"{_ENDED}/{rank}" for rank in range(dist.get_world_size())]
        own = ranks[dist.get_rank()]
        if store.check([own]):
            return
        store.set(own, "")
        while not store.check(ranks) and time.monotonic() < until:
            time.sleep(LISTEN_SECONDS)


def failure_reason() -> str | None:
    """The reason left by the first rank to fail; None if there is none, or the store is unreachable."""
    with suppress(RuntimeError, dist.DistError):
        if dist.is_initialized() and _store().check([_WORDS]):
            return bytes(_store().get(_WORDS)).decode()
    return None


def _store() -> Store:
    store: Store = _get_default_store()
    return store


LOOK_SECONDS = 1.0
"""Polling interval of the monitor."""

END_SECONDS = 60.0
"""How long a rank waits for its device after SIGTERM: it may finish a step, or wait for a lost rank."""

DEVICE_LOOK_SECONDS = 0.001
"""Polling interval of a wait for a device."""

LOOK_FOR_SIGN_SECONDS = 0.1
"""Polling interval for the launcher's sign that other hosts are lost."""


@dataclass(frozen=True)
class Launched:
    """Communication that was started."""

    work: dist.Work
    blocks_host: bool  # whether the host waits for it; else a device's stream
    finish: Callable[[], object] | None = None  # what is done with the received data after the wait


@dataclass(frozen=True)
class _DeviceWait:
    """A wait of a device: whether it is over, when it was enqueued, for what, and with whom."""

    is_past: Callable[[], bool]
    since: float
    action: str
    ranks: tuple[int, ...]


_aborted: tuple[dist.ProcessGroup, RuntimeFault] | None = None
"""The group of all ranks when this process aborted its communicators, which all engines share, and why."""


def _world_now() -> Callable[[], dist.ProcessGroup | None]:
    """The group of all ranks, without keeping it: it joins its threads when nothing refers to it any more."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return weakref.ref(world) if world is not None else lambda: None


@dataclass
class Waits:
    """How this process waits for its peers."""

    timeout: timedelta  # the limit of any wait
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of this process
    lines: Lines = field(default_factory=Lines)  # closed if a wait fails
    linger_seconds: float = LINGER_SECONDS  # how long this process, if it fails, waits for the errors of others
    # of all ranks, when this was made: another may have come by the time that a device fails
    group: Callable[[], dist.ProcessGroup | None] = field(default_factory=_world_now)
    _lost: str | None = None
    _watched: deque[_DeviceWait] = field(default_factory=deque)
    _monitor: threading.Thread | None = None
    _fault: RuntimeFault | None = None  # of the device
    _progress: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, launched: Launched | None, action: str, ranks: Sequence[int]) -> None:
        """Waits for communication, on the host or on the device's stream.

        Args:
            launched: None is done already.
            action: what it is for (``1RECV_F3``).
            ranks: the other ranks in it.

        Raises:
            RuntimeFault: a peer died, or the limit passed, in this wait or in an earlier one of the device.
        """
        if self._fault is not None or _aborted is not None:
            self._raise_fault()
        if launched is None:
            return
        try:
            if launched.blocks_host:
                launched.work.wait(self.timeout)
            else:
                launched.work.wait()
            if launched.finish is not None:
                launched.finish()
        except (RuntimeError, dist.DistError) as error:
            raise self._failed(action, ranks, error) from error
        if launched.blocks_host:
            return
        with self._lock:
            self._watched.append(_DeviceWait(_past(launched.work), time.monotonic(), action, tuple(ranks)))
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._keep_looking, name="whale waits", daemon=True)
                self._monitor.start()

    def wait_for_device(self, is_done: Callable[[], bool], action: str, ranks: Sequence[int], is_to_end: Callable[[], bool]) -> None:
        """Waits on the host until a device is done, although it may be waiting for lost ranks.

        Args:
            is_done: whether it is.
            is_to_end: whether this process was told to end; then it waits `END_SECONDS` more.

        Raises:
            RuntimeFault: ranks are lost, or the limit passed, in this wait or in an earlier one of the device.
        """
        until: float | None = None
        while not is_done():
            self._raise_fault()
            if until is None and is_to_end():
                until = time.monotonic() + END_SECONDS
            said = self._lost
            if said is None and until is not None and time.monotonic() >= until:
                said = f"the device still waits {END_SECONDS:g} s after SIGTERM"
            if said is not None:
                self.lines.close_all()
                raise fault(action, ranks, self.timeout, TimeoutError("the device still waits"), said)
            time.sleep(DEVICE_LOOK_SECONDS)
        self._raise_fault()  # it may be done because its communicators were aborted

    @property
    def has_lost_device(self) -> bool:
        """Whether communicators were aborted, by any engine, so that what lies on the device is not to be used."""
        return self._device_fault() is not None

    def _device_fault(self) -> RuntimeFault | None:
        if self._fault is None and _aborted is not None and self.group() is _aborted[0]:
            self._fault = _aborted[1]
        return self._fault

    def _raise_fault(self) -> None:
        if (fault := self._device_fault()) is not None:
            raise fault

    @contextmanager
    def speaking(self, action: str, ranks: Sequence[int]) -> Iterator[None]:
        """Turns a backend's error into a `RuntimeFault` that says what was being done, and with whom."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise self._failed(action, ranks, error) from error

    def _failed(self, action: str, ranks: Sequence[int], error: BaseException) -> RuntimeFault:
        """Hangs up, since this rank cannot go on either, and returns the error."""
        said = self._lost or failure_reason()  # the store may be unreachable, too
        self.lines.close_all()
        return fault(action, ranks, self.timeout, error, said)

    def heed(self, sign: Path) -> None:
        """Gives up all waits as soon as a file appears, by which the launcher says that other hosts are lost."""

        ends = threading.Event()

        def look() -> None:
            while not ends.wait(LOOK_FOR_SIGN_SECONDS):
                if sign.exists():
                    self._lost = "this host's launcher cannot reach ranks of another host"
                    self.lines.close_all()
                    return

        def leave() -> None:
            ends.set()
            looking.join(self.timeout.total_seconds())

        looking = threading.Thread(target=look, name="whale sign", daemon=True)
        looking.start()
        atexit.register(leave)  # a thread that still runs while the interpreter ends would abort the process

    def look(self, now: float) -> RuntimeFault | None:
        """Drops waits that are over, in order; returns the fault if a rank has failed, or the first wait is overdue.

        The host runs ahead of the device, so queued waits have not begun: the limit of the first counts from when it was enqueued, or
        from when its predecessor was seen done, whichever is later.
        """
        while self._watched and self._watched[0].is_past():
            self._watched.popleft()
            self._progress = now
        if self._watched and self._device_fault() is None:
            first, said = self._watched[0], self._lost or failure_reason()
            if said is not None or max(first.since, self._progress) + self.timeout.total_seconds() < now:
                self._fault = fault(first.action, first.ranks, self.timeout, TimeoutError("the device still waits"), said)
        return self._fault

    def _keep_looking(self) -> None:
        """Ends when nothing is left to watch; the next wait starts another thread."""
        if self.device.type == "cuda":  # of this thread; else it would make a context on the first GPU
            torch.cuda.set_device(self.device)
        pause = threading.Event()
        while self.look(time.monotonic()) is None:
            with self._lock:
                if not self._watched:
                    self._monitor = None
                    return
            pause.wait(LOOK_SECONDS)
        if _aborted is None or _aborted[1] is not self._fault:
            print(f"RuntimeFault: {self._fault}", file=sys.stderr, flush=True)  # the host may be blocked by the device
        _note_abort(self.group(), self._fault)
        self.lines.abort()


def _note_abort(group: dist.ProcessGroup | None, fault: RuntimeFault | None) -> None:
    global _aborted
    if fault is not None and group is not None:
        _aborted = group, fault


def _past(work: dist.Work) -> Callable[[], bool]:
    """A test whether the device is past a wait that was just enqueued.

    It uses an event after the wait: polling the work itself would keep its tensors alive until the monitor looks.
    """
    if not torch.cuda.is_available():
        return work.is_completed
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query


_LEFT = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "socket closed")
_LATE = ("timed out", "timeout", "still waits")


def fault(action: str, ranks: Sequence[int], timeout: timedelta, error: BaseException, said: str | None = None) -> RuntimeFault:
    """The error for communication that did not complete; the backend's error is its cause.

    Args:
        action: what was being done.
        timeout: the limit.
        error: the backend's.
        said: the reason left by the rank that failed first, if any.
    """
    text = f"{type(error).__name__} {error}".lower()
    if said is not None:
        reason, hint = said, "that rank's own output says more"
    elif any(word in text for word in _LEFT):
        reason, hint = "a rank has left: its process has ended, or its engine was closed", "that rank's own output says why"
    elif any(word in text for word in _LATE):
        seconds = f"{timeout.total_seconds():g}"
        reason = f"nothing was received within communication.timeout_seconds ({seconds})"
        hint = "that rank's own output shows what it was doing; raise the limit if it is only slow"
    else:
        reason, hint = f"the backend failed ({type(error).__name__})", "that rank's own output says more; WHALE_DEBUG=1 shows the cause"
    found = RuntimeFault(f"{action} with {listed('rank', ranks)} did not complete: {reason}", hint=hint)
    found.lost_peers = True
    return found
