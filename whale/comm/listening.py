"""Stores that listen at one address, where torch's own listen at all."""

from __future__ import annotations

import socket
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


def listening_at(address: str, port: int) -> socket.socket:
    """A socket at an address of this host; port 0 takes a free one.

    Raises:
        ValueError: it is no address but a host's name; `localhost` is the loopback interface.
        OSError: it is no address of this host, or in use.
    """
    own = ip_address(LOOPBACK if address == "localhost" else address)
    return socket.create_server((str(own), port), family=socket.AF_INET6 if own.version == 6 else socket.AF_INET)


def store_on(listener: socket.socket, timeout: timedelta = timedelta(minutes=5), num_ranks: int | None = None) -> TCPStore:
    """The store that listens on a socket, which it takes over.

    Args:
        listener: of `listening_at`.
        timeout: of each call; by default torch's.
        num_ranks: to wait for; None for nobody.
    """
    address, port = listener.getsockname()[:2]
    waits, descriptor = num_ranks is not None, listener.detach()
    return TCPStore(address, port, num_ranks, True, timeout, wait_for_workers=waits, multi_tenant=True, master_listen_fd=descriptor)
