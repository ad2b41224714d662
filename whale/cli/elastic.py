"""``whale run --elastic MIN:MAX``: torchrun's agents and rendezvous, configured so that a run goes on with the launchers that are there.

Each host has a launcher. When a rank dies, or a launcher comes or goes, all ranks end; the launchers that are there meet again and
restart the script with new numbers of ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import zlib
from contextlib import suppress
from math import ceil
from pathlib import Path

from whale.errors import ConfigError

PARTIAL, KEEP = "WHALE_CLUSTER_PARTIAL", "WHALE_RUNTIME_KEEP_ON_FAULT"

MEETING = "whale-c10d"
"""What torchrun knows the rendezvous as that launchers meet at (`whale.cli.meeting`)."""

KEPT = "kept"
"""The folder in the run directory where ranks leave what they hold."""

QUIET = ("TORCH_CPP_LOG_LEVEL", "ERROR")
"""Of torch: a peer that is gone is a warning with forty lines of frames in each process that it leaves, where we say it in one."""

MOST_RESTARTS = 1 << 20
"""Of torchrun, which counts those of a training of months too; `deaths` ends what restarts in vain."""

LAST_CALL_SECONDS = 3
"""So long do launchers, if they are enough, wait for others."""

SHUTDOWN, SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 120
"""torchrun's variable for the time from SIGTERM to SIGKILL, and so long may ranks take to leave what they hold."""

SILENT_SECONDS, LEAST_BEATS = 10, 4
"""So long may a launcher give no sign of life, and so many may it miss, before the others meet without it: it may share a busy host."""


def be_elastic(arguments: argparse.Namespace) -> dict[str, str]:
    """Sets torchrun's arguments for the number of launchers of ``--elastic``; gives the environment of launcher and ranks.

    Raises:
        ConfigError: it is no number, or other flags contradict it.
    """
    least, most = _bounds(arguments.elastic)
    for flag, is_given in {
        "--standalone": arguments.standalone,
        "--nnodes": str(arguments.nnodes) != "1:1",
        "--node-rank": arguments.node_rank != 0,
    }.items():
        if is_given:
            raise ConfigError(f"{flag} cannot be given together with --elastic, which numbers the launchers", hint=f"leave out {flag}")
    arguments.nnodes = f"{least}:{most}"
    if arguments.rdzv_backend in ("static", "c10d"):  # the first is torchrun's default
        arguments.rdzv_backend = MEETING
    if not arguments.rdzv_endpoint:
        if most > 1:
            raise ConfigError(
                f"--elastic {arguments.elastic} needs --rdzv-endpoint HOST:PORT, the same for all launchers",
                hint="name the host that is least likely to leave: the run ends with its first launcher",
            )
        arguments.rdzv_endpoint = "localhost:0"
    if is_local(arguments.rdzv_endpoint):
        arguments.local_addr = arguments.local_addr or "localhost"
    beat_seconds = 1 + most // 64
    beats = max(LEAST_BEATS, ceil(SILENT_SECONDS / beat_seconds))
    own = f"last_call_timeout={LAST_CALL_SECONDS},keep_alive_interval={beat_seconds},keep_alive_max_attempt={beats}"
    arguments.rdzv_conf = f"{own},{arguments.rdzv_conf}" if arguments.rdzv_conf else own  # of equal keys the last counts
    arguments.max_restarts = arguments.max_restarts or MOST_RESTARTS
    # torchrun would let ranks meet at the store of the first launcher, which may be gone, by a number of restarts that launchers differ in
    shutdown = os.environ.get(SHUTDOWN, str(SHUTDOWN_SECONDS))
    return {SHUTDOWN: shutdown, PARTIAL: "true", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def left_at(memory: Path, arguments: argparse.Namespace) -> Path:
    """Where the launchers of a run on this host leave what its ranks kept, if the run ends without its rendezvous; the next start looks.

    Args:
        memory: of this host, which the folder is in.
        arguments: torchrun's: the same script and endpoint is the same run.
    """
    run = (arguments.training_script, os.getcwd(), arguments.rdzv_endpoint, arguments.rdzv_id)
    return memory / f"whale_kept_{os.getuid()}_{zlib.crc32(repr(run).encode()):08x}"


def leave_kept(kept: Path, place: Path) -> bool:
    """Moves what ranks kept out of the folder of a run that ends; whether there was anything, and the place is this user's."""
    from whale.runtime.execute.status import LOST

    if not any(kept.glob("*.json")):
        return False
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(place):
            return False
        for file in kept.iterdir():
            if file.name != LOST:
                file.rename(place / file.name)
    except OSError:
        return False
    return True


def take_up_kept(place: Path, kept: Path) -> None:
    """Gives a run what `leave_kept` has left; of several launchers of this host the first takes it."""
    with suppress(OSError):
        if _is_own(place):
            place.rename(kept)


def _is_own(folder: Path) -> bool:
    """Whether this user alone can have written to it: in a folder that all users share anybody may take a name."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def is_local(endpoint: str) -> bool:
    """Whether an endpoint is an address of this host that no other can reach."""
    return endpoint.partition(":")[0] in ("127.0.0.1", "localhost")


def _bounds(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if found is None:
        raise ConfigError(f"--elastic {text} is not MIN:MAX, numbers of launchers, one on each host", hint="--elastic 2:8")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise ConfigError(f"--elastic {least}:{most} is not MIN:MAX with 1 <= MIN <= MAX")
    return least, most
