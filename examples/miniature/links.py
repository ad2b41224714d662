"""Slow links between processes of one machine: a network namespace each, joined by a bridge, with a bandwidth.

    rank 0 [whale-N-0] ---- token bucket ----+
                                             |  bridge
    rank 1 [whale-N-1] ---- token bucket ----+

Needs root, and Debian's iproute2. All of it goes at the end; what a killed process has left goes when the next begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miniature.owners import is_left_over, name_of

NETWORK = "10.213.{0}"
CLONE_NEWNET = 0x40000000
NAMESPACES, INTERFACES = Path("/run/netns"), Path("/sys/class/net")


@dataclass(frozen=True)
class Links:
    """Namespaces, one per rank.

    Attributes:
        names: of the namespaces.
        addresses: of the ranks in them.
        outside: the address of this machine itself, as the ranks see it.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    outside: str

    def enter(self, rank: int) -> None:
        """Moves this process into its namespace; before it opens sockets or starts threads that do."""
        descriptor = os.open(NAMESPACES / self.names[rank], os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"the namespace {self.names[rank]} cannot be entered")
        finally:
            os.close(descriptor)


def can_make_links() -> bool:
    """Whether this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


@contextlib.contextmanager
def slow_links(num_ranks: int, megabits: float) -> Iterator[Links]:
    """Joins so many namespaces by links of this speed each way.

    Args:
        num_ranks: namespaces to make.
        megabits: per second, of every link.

    Raises:
        subprocess.CalledProcessError: the kernel or the rights do not allow it.
    """
    _sweep()
    own, network = os.getpid(), NETWORK.format(os.getpid() % 250)
    numbers = range(num_ranks)
    links = Links(tuple(map(name_of, numbers)), tuple(f"{network}.{rank + 1}" for rank in numbers), f"{network}.254")
    with contextlib.ExitStack() as stack:
        bridge = name_of("b")
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{links.outside}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for rank, (name, address) in enumerate(zip(links.names, links.addresses, strict=True)):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _join(name, address, bridge, f"wv{own}-{rank}", megabits)
        yield links


def _sweep() -> None:
    """Removes what processes that are no more have left; a namespace takes its links with it."""
    for folder, command in ((NAMESPACES, ("netns", "del")), (INTERFACES, ("link", "del"))):
        for path in folder.glob("*"):
            if is_left_over(path.name):
                with contextlib.suppress(subprocess.CalledProcessError):  # somebody else sweeps too
                    _ip(*command, path.name)


def _join(namespace: str, address: str, bridge: str, outside: str, megabits: float) -> None:
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("link", "set", outside, "master", bridge, "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", namespace, "link", "set", device, "up")
    bucket = ("tbf", "rate", f"{megabits}mbit", "burst", "128kb", "latency", "400ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", *bucket)
    _run("tc", "qdisc", "add", "dev", outside, "root", *bucket)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
