"""Where the launchers of an elastic run meet: torchrun's rendezvous, which also reports that one of them has gone silent.

torchrun's agents restart where a rank of their own has ended, and where a launcher comes. A host that is cut off or frozen ends no rank
of another: these would wait for it as long as they may. The rendezvous knows by its keep-alives.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from whale.cli.elastic import KEEP, LOOPBACK, MEETING, SILENT_SECONDS, is_local
from whale.runtime.execute.status import LOST

TIMEOUTS = ("join", "last_call", "close", "heartbeat")
"""Those of torchrun's rendezvous."""

SETTLING_SECONDS = 1.5
"""So long is a launcher between two meetings at most, where it is in neither; the state of the rendezvous is read once per second."""


class Meeting(DynamicRendezvousHandler):
    """torchrun's rendezvous over c10d, whose agents also restart where one of them has gone silent."""

    _met: frozenset[object] = frozenset()
    _silent_since = math.inf
    _is_told = False
    port: int | None = None
    """Of the store, where one launcher is alone on this host: its ranks meet there too, and open no other."""

    @property
    def use_agent_store(self) -> bool:
        return self.port is not None

    def get_backend(self) -> str:
        return MEETING

    def next_rendezvous(self) -> RendezvousInfo:
        self._stop_heartbeats()
        self._met, self._silent_since, self._is_told = frozenset(), math.inf, False
        (Path(os.environ[KEEP]) / LOST).unlink(missing_ok=True)
        found = super().next_rendezvous()
        with self._heartbeat_lock:
            self._met = frozenset(self._state_holder.state.participants)
        if self.port is None:
            return found
        return RendezvousInfo(found.store, found.rank, found.world_size, RendezvousStoreInfo(LOOPBACK, self.port))

    def num_nodes_waiting(self) -> int:
        """For how many launchers all restart: those that wait, and those that are silent."""
        num_waiting: int = super().num_nodes_waiting()
        with self._heartbeat_lock:
            return self._tell_silent() or num_waiting

    def _keep_alive(self) -> None:
        """In the thread that sends keep-alives: the agent itself may be ending its ranks, which may wait for those of a silent host."""
        super()._keep_alive()
        with self._heartbeat_lock:
            self._tell_silent()

    def _tell_silent(self) -> int:
        """Tells the ranks, once, that launchers are silent; how many are."""
        state, num_met = self._state_holder.state, len(self._met)
        silent = frozenset() if state.closed else self._met - {*state.participants, *state.wait_list, *state.redundancy_list}
        if not silent:
            self._silent_since = math.inf
            return 0
        self._silent_since = min(self._silent_since, time.monotonic())
        if time.monotonic() - self._silent_since < SETTLING_SECONDS:
            return 0
        if not self._is_told:
            self._is_told = True
            with suppress(OSError):  # no room: ranks notice by themselves
                Path(os.environ[KEEP]).mkdir(mode=0o700, exist_ok=True)
                (Path(os.environ[KEEP]) / LOST).touch()
            print(f"whale run: {len(silent)} of {num_met} launchers cannot be reached; all ranks restart", file=sys.stderr, flush=True)
        return len(silent)


def register() -> None:
    rendezvous_handler_registry.register(MEETING, _meeting)


def _meeting(parameters: RendezvousParameters) -> Meeting:
    backend, store, port = _open(parameters)
    seconds = {name: parameters.get_as_int(f"{name}_timeout") for name in TIMEOUTS}
    found: Meeting = Meeting.from_backend(
        parameters.run_id,
        store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(**{name: timedelta(seconds=limit) for name, limit in seconds.items() if limit is not None}),
        keep_alive_interval=parameters.get_as_int("keep_alive_interval") or 1,
        keep_alive_max_attempt=parameters.get_as_int("keep_alive_max_attempt") or SILENT_SECONDS,
    )
    found.port = port if parameters.max_nodes == 1 else None
    return found


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
    descriptor = listener.detach()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor, timeout=timeout)
    return C10dRendezvousBackend(store, parameters.run_id), store, port if address == LOOPBACK else None


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket at the address that a name stands for; None where a host has its own name for the loopback interface: others do not.

    Raises:
        OSError: it is no address of this host, or in use.
    """
    if is_local(host):
        return socket.create_server((LOOPBACK, port))
    family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return None if ip_address(address).is_loopback else socket.create_server((address, port), family=family)
