"""Waiting for communication with a limit, and saying who and what was waited for when it runs out, or why a rank cannot go on.

Where the host carries messages (Gloo), it waits, no longer than the limit. Where a device does (NCCL), a wait only orders
the device's streams and returns at once: the host runs ahead. The limit is then kept by a monitor beside it, which looks
at what has been waited for; the next wait, or the end of the process by NCCL's own watchdog, tells what it found.

A rank that cannot go on says why and hangs up, so that nobody waits for it. Its last words go to the store that all ranks share; the first
rank to speak is the cause, and who fails because of it adds nothing. Gloo has no call that closes a connection. It closes all those of a
group when a receive outlasts its limit, and tells the other end, so hanging up is a receive of what nobody sends, with next to no limit.
Who loses a line hangs up too: the news reaches ranks that have no line to the first. NCCL closes nothing; there the monitor of `Waits`
reads the words.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from whale.errors import RuntimeFault
from whale.units import listed


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """The backend (``gloo``, ``nccl``) that a group uses for tensors of a device; None where it has none for them.

    A group of an imagined world does as Gloo would.

    Args:
        device: where the tensors lie.
        group: torch's; the world's own by default.
    """
    served = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl": torch tells the whole, whatever the device
    found = dict(pair.split(":") for pair in served.split(",")).get(device.type)
    return "gloo" if found == "fake" else found


def blocks_host(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether who waits for tensors of a device waits on the host; with NCCL the device does."""
    return device.type == "cpu" or backend_of(device, group) != "nccl"


_WORDS = "whale/last words"
_ENDED = "whale/ends in an error"
_TAG = 0x5EA  # of a message that is never sent
_MAX_LENGTH = 300

LINGER_SECONDS = 3.0
"""So long does a rank that fails wait for the others to say why they fail: launchers end all who live when one has ended."""

LISTEN_SECONDS = 0.02
"""So often it looks whether they have."""


@dataclass
class Lines:
    """The process groups that this process speaks through, beside the world's own."""

    _groups: list[dist.ProcessGroup] = field(default_factory=list)

    def add(self, group: dist.ProcessGroup) -> None:
        """A group was made."""
        self._groups.append(group)

    def remove(self, group: dist.ProcessGroup) -> None:
        """A group is about to be destroyed."""
        if group in self._groups:
            self._groups.remove(group)

    def hang_up(self) -> None:
        """Closes all lines that go over Gloo: whoever waits at the other end fails at once."""
        if dist.is_initialized():
            for group in (dist.group.WORLD, *self._groups):
                with suppress(KeyError, TypeError, ValueError):  # torch's, of a group that the main thread has destroyed meanwhile
                    if group is not None and backend_of(torch.device("cpu"), group) == "gloo":
                        _close(group)


def _close(group: dist.ProcessGroup) -> None:
    """Closes all lines of a group; of a peer that has closed its own a receive fails before it outlasts its limit, and closes none."""
    for peer in (rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()):
        try:
            work = dist.irecv(torch.empty(1, dtype=torch.uint8), peer, group=group, tag=_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except (RuntimeError, dist.DistError) as error:  # how it ends: nothing comes
            if any(word in str(error).lower() for word in _LATE):
                return


def say_why(error: BaseException) -> None:
    """Leaves the reason why this rank fails, if it is the first to fail."""
    first = (str(error).splitlines() or [""])[0][:_MAX_LENGTH]
    said = f"rank {dist.get_rank()} has failed: {type(error).__name__}" + (f": {first}" if first else "")
    with suppress(RuntimeError, dist.DistError):  # who kept the store has ended
        _store().compare_set(_WORDS, "", said)


def end_together(most_seconds: float) -> None:
    """Waits, once, until all ranks have come to end in an error, but no longer than that: who comes here has printed its own."""
    if most_seconds <= 0:
        return
    with suppress(RuntimeError, dist.DistError):  # who kept the store has ended
        store, until = _store(), time.monotonic() + most_seconds
        ranks = [f"{_ENDED}/{rank}" for rank in range(dist.get_world_size())]
        own = ranks[dist.get_rank()]
        if store.check([own]):
            return
        store.set(own, "")
        while not store.check(ranks) and time.monotonic() < until:
            time.sleep(LISTEN_SECONDS)


def last_words() -> str | None:
    """What the first rank to fail said; None where none did, or nobody can tell any more."""
    with suppress(RuntimeError, dist.DistError):
        if dist.is_initialized() and _store().check([_WORDS]):
            return bytes(_store().get(_WORDS)).decode()
    return None


def _store() -> Store:
    store: Store = _get_default_store()
    return store


LOOK_SECONDS = 1.0
"""How often the monitor looks."""

END_SECONDS = 60.0
"""So long does a rank that is told to end wait for its device, which may do a step, or wait for a rank that is gone."""

DEVICE_LOOK_SECONDS = 0.001
"""How often a rank that waits for its device looks."""

LOOK_FOR_SIGN_SECONDS = 0.1
"""How often a rank looks whether the launcher says that others cannot be reached."""


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
class _DeviceWait:
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
        linger_seconds: so long does this process, where it fails, wait for the others to say why they fail.
    """

    timeout: timedelta
    lines: Lines = field(default_factory=Lines)
    linger_seconds: float = LINGER_SECONDS
    _lost: str | None = None
    _watched: deque[_DeviceWait] = field(default_factory=deque)
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
            self._watched.append(_DeviceWait(_past(launched.work), time.monotonic(), action, tuple(ranks)))
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._keep_looking, name="whale waits", daemon=True)
                self._monitor.start()

    def wait_for_device(self, is_done: Callable[[], bool], action: str, ranks: Sequence[int], is_to_end: Callable[[], bool]) -> None:
        """Waits on the host until a device has done what it was asked to, which may be to wait for ranks that are lost.

        Args:
            is_done: whether it has.
            action: what for.
            ranks: the others.
            is_to_end: whether this process was told to end; then it waits `END_SECONDS` more.

        Raises:
            RuntimeFault: ranks are lost, or the limit passed, in this wait or in an earlier one of the device.
        """
        until: float | None = None
        while not is_done():
            if self._fault is not None:
                raise self._fault
            if until is None and is_to_end():
                until = time.monotonic() + END_SECONDS
            said = self._lost
            if said is None and until is not None and time.monotonic() >= until:
                said = f"the device still waits {END_SECONDS:g} s after SIGTERM"
            if said is not None:
                self.lines.hang_up()
                raise fault(action, ranks, self.timeout, TimeoutError("the device still waits"), said)
            time.sleep(DEVICE_LOOK_SECONDS)

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
        said = self._lost or last_words()  # the store may be out of reach, too
        self.lines.hang_up()
        return fault(action, ranks, self.timeout, error, said)

    def heed(self, sign: Path) -> None:
        """Gives up, from now on, what this process waits for as soon as a file is there: others cannot be reached, says the launcher."""

        ends = threading.Event()

        def look() -> None:
            while not ends.wait(LOOK_FOR_SIGN_SECONDS):
                if sign.exists():
                    self._lost = "ranks of another host cannot be reached, as this host's launcher has found"
                    self.lines.hang_up()
                    return

        def leave() -> None:
            ends.set()
            looking.join(self.timeout.total_seconds())

        looking = threading.Thread(target=look, name="whale sign", daemon=True)
        looking.start()
        atexit.register(leave)  # a thread that is in the midst of it while the interpreter ends would abort the process

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
    found = RuntimeFault(f"{action} with {listed('rank', ranks)} did not complete: {reason}", hint=hint)
    found.lost_peers = True
    return found
