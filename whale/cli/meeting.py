"""Where the launchers of an elastic run meet: torchrun's rendezvous, and a report where one of them has gone silent.

torchrun's agents restart where a rank of their own has ended, and where a launcher comes. A host that is cut off or frozen ends no rank
of another: these would wait for it as long as they may. So each launcher counts up a key of its own in the store that they met at.

    store     meeting 4/beat 0: 71, beat 1: 70, beat 2: 12     launcher 2 has been silent for long
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from whale.cli.elastic import KEEP, MEETING, SILENT_SECONDS, is_local
from whale.comm.listening import LOOPBACK, listening_at, store_on
from whale.runtime.execute.status import LOST


@dataclass
class _Met:
    """Launchers that have met."""

    store: Store  # of this meeting alone, over a connection of its own: an agent that waits for another holds the rendezvous' own
    rank: int
    beats: tuple[str, ...]  # the key of each launcher
    heard: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # the last new beat of each, and when
    num_silent: int = 0

    def hear(self, silent_seconds: float) -> None:
        found, now = self.store.multi_get(list(self.beats)), time.monotonic()
        self.heard |= {key: (beat, now) for key, beat in zip(self.beats, found, strict=True) if self.heard.get(key, ("",))[0] != beat}
        self.num_silent = sum(now - when > silent_seconds for _, when in self.heard.values())


class Meeting(RendezvousHandler):
    """torchrun's rendezvous, whose agents also restart where one of them has gone silent.

    Args:
        rendezvous: torchrun's.
        beat_seconds: between two signs of life.
        silent_seconds: so long may a launcher give none.
        port: of the store, where one launcher is alone on this host: its ranks meet there too, and open no other.
    """

    def __init__(self, rendezvous: RendezvousHandler, beat_seconds: float, silent_seconds: float, port: int | None = None) -> None:
        self._rendezvous, self._port = rendezvous, port
        self._beat_seconds, self._silent_seconds = beat_seconds, silent_seconds
        self._beating: Sequence[_Met] = ()  # the last two meetings: others may be ending their ranks of the one before
        self._met: _Met | None = None  # while its ranks run
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True)

    @property
    def use_agent_store(self) -> bool:
        return self._port is not None

    def get_backend(self) -> str:
        return MEETING

    def get_run_id(self) -> str:
        return self._rendezvous.get_run_id()

    def is_closed(self) -> bool:
        return self._rendezvous.is_closed()

    def set_closed(self) -> None:
        self._rendezvous.set_closed()  # type: ignore[no-untyped-call]

    def shutdown(self) -> bool:
        self._end()
        return self._rendezvous.shutdown()

    def next_rendezvous(self) -> RendezvousInfo:
        with self._lock:
            self._met = None
            (Path(os.environ[KEEP]) / LOST).unlink(missing_ok=True)
        found = self._rendezvous.next_rendezvous()
        met = _Met(found.store.clone(), found.rank, tuple(f"beat {rank}" for rank in range(found.world_size)))  # type: ignore[attr-defined]
        for beat in met.beats:
            met.store.add(beat, 0)  # to read what is not there would wait for it
        with self._lock:
            self._met, self._beating = met, (*self._beating[-1:], met)
        if self._thread.ident is None:
            self._thread.start()
            atexit.register(self._end)  # a thread in a store's call would abort an interpreter that ends
        if self._port is None:
            return found
        return RendezvousInfo(found.store, found.rank, found.world_size, RendezvousStoreInfo(LOOPBACK, self._port))

    def num_nodes_waiting(self) -> int:
        """For how many launchers all restart: those that wait, and those that are silent."""
        num_waiting = self._rendezvous.num_nodes_waiting()
        met = self._met
        return num_waiting if met is None or not met.num_silent or self.is_closed() else met.num_silent

    def _keep_beating(self) -> None:
        """In a thread: the agent itself may be ending its ranks, which may wait for those of a silent host."""
        while not self._has_ended.wait(self._beat_seconds):
            with suppress(DistError, RuntimeError):  # the agent says that the store is gone
                self._beat()

    def _beat(self) -> None:
        """Gives a sign of life, and tells the ranks, once, that launchers are silent."""
        for each in self._beating:
            each.store.add(each.beats[each.rank], 1)
        if (met := self._met) is None:
            return
        before = met.num_silent
        met.hear(self._silent_seconds)
        if before or not met.num_silent or self.is_closed():
            return
        with self._lock:
            if self._met is not met:
                return
            with suppress(OSError):  # no room: ranks notice by themselves
                Path(os.environ[KEEP]).mkdir(mode=0o700, exist_ok=True)
                (Path(os.environ[KEEP]) / LOST).touch()
        said = f"{met.num_silent} of {len(met.beats)} launchers cannot be reached"
        print(f"whale run: {said}; all ranks restart", file=sys.stderr, flush=True)

    def _end(self) -> None:
        self._has_ended.set()
        if self._thread.ident is not None:
            self._thread.join()


def register() -> None:
    rendezvous_handler_registry.register(MEETING, _meeting)


def _meeting(parameters: RendezvousParameters) -> Meeting:
    backend, store, port = _open(parameters)
    beat_seconds = parameters.get_as_int("keep_alive_interval") or 1
    silent_seconds = beat_seconds * (parameters.get_as_int("keep_alive_max_attempt") or SILENT_SECONDS)
    rendezvous = create_handler(store, backend, parameters)
    return Meeting(rendezvous, beat_seconds, silent_seconds, port if parameters.max_nodes == 1 else None)


DEFAULT_PORT, READ_SECONDS = 29400, 60
"""Of torchrun's rendezvous."""


def _open(parameters: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store, int | None]:
    """The store that launchers meet at, and its port if it is on the loopback interface.

    What launchers leave there, others unpickle: the store listens at the address that was named, where torchrun's listens at all.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    may_hold = parameters.get("store_type", "tcp") == "tcp" and parameters.get_as_bool("is_host") is not False
    try:
        listener = _listener(host, port) if may_hold else None
    except OSError as error:
        listener = None
        if error.errno == errno.EADDRINUSE:  # another launcher of this host holds it
            parameters.config["is_host"] = "false"
    if listener is None:
        return *create_backend(parameters), None
    address, port = listener.getsockname()[:2]
    timeout = timedelta(seconds=parameters.get_as_int("read_timeout", READ_SECONDS) or READ_SECONDS)
    store = store_on(listener, timeout)
    return C10dRendezvousBackend(store, parameters.run_id), store, port if address == LOOPBACK else None


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket at the address that a name stands for; None where a host has its own name for the loopback interface: others do not.

    Raises:
        OSError: it is no address of this host, or in use.
    """
    if is_local(host):
        return listening_at(LOOPBACK, port)
    *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return None if ip_address(address).is_loopback else listening_at(str(address), port)
