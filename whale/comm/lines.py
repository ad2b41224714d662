"""The open lines of this rank to its peers: a rank that cannot go on says why and hangs up, so that nobody waits for it.

Its last words go to the store that all ranks share; the first rank to speak is the cause, and who fails because of it adds
nothing. Gloo has no call that closes a connection. It closes all those of a group when a receive outlasts its limit, and
tells the other end, so hanging up is a receive of what nobody sends, with next to no limit. Who loses a line hangs up too:
the news reaches ranks that have no line to the first. NCCL closes nothing; there the monitor of `Waits` reads the words.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from whale.comm.backend import backend_of

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
                if group is not None and backend_of(torch.device("cpu"), group) == "gloo":
                    _close(group)


def _close(group: dist.ProcessGroup) -> None:
    peer = next((rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()), None)
    with suppress(RuntimeError, dist.DistError):  # how it ends: nothing comes
        work = None if peer is None else dist.irecv(torch.empty(1, dtype=torch.uint8), peer, group=group, tag=_TAG)
        if work is not None:
            work.wait(timedelta(milliseconds=1))


def say_why(error: BaseException) -> None:
    """Leaves the reason why this rank fails, if it is the first to fail."""
    first = (str(error).splitlines() or [""])[0][:_MAX_LENGTH]
    said = f"rank {dist.get_rank()} has failed: {type(error).__name__}" + (f": {first}" if first else "")
    with suppress(RuntimeError, dist.DistError):  # who kept the store has ended
        _store().compare_set(_WORDS, "", said)


def end_together() -> None:
    """Waits, once, until all ranks have come to end in an error, `LINGER_SECONDS` at most: who comes here has printed its own."""
    with suppress(RuntimeError, dist.DistError):  # who kept the store has ended
        store, until = _store(), time.monotonic() + LINGER_SECONDS
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
