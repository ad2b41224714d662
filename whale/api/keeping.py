"""What a rank leaves of its training where it loses its peers, for the ranks that begin anew, and what these are told of it.

With ``memory.redundancy: 1`` that is the copies of the last steps, too, which hold what another host alone has held.
"""

from __future__ import annotations

import atexit
import gc
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from whale.comm import World
from whale.config import Config
from whale.errors import CheckpointError, ConfigError, warn
from whale.ir.cluster import Cluster
from whale.runtime.checkpoint.training_state import random_state
from whale.runtime.execute.status import FALL, LOST
from whale.units import counted, format_bytes

if TYPE_CHECKING:
    from whale.runtime.checkpoint.copies import StateCopies

DEVICE_SECONDS = 5.0
"""So long may a GPU take to do what it was asked to before its peers were lost; it may wait for one of them for ever."""

LOOK_SECONDS = 0.01
"""Between two looks whether it has."""


@dataclass
class FaultKeeper:
    """Of one engine.

    Attributes:
        folder: in memory of this host.
        training: tells this start of the engine from all others; equal on all ranks.
        purpose: the folder that `resume` was given, which tells the engine from others of the script; None before that, and then nothing
            is kept.
        is_changing: whether a call is under way, or was left in the middle, that changes the state otherwise than by a step.
        begun: the number of steps done, and where the data went on, before the step under way; None between steps.
        random: the state of the generators when the last step was done.
        is_done: whether this rank has left what it holds of the last step.
        copies: of the last steps, for themselves and for other hosts; None where none are made.
    """

    folder: Path
    training: str
    purpose: str | None = None
    is_changing: bool = False
    begun: tuple[int, Mapping[str, int] | None] | None = None
    random: Mapping[str, Any] = field(default_factory=random_state)
    is_done: bool = False
    copies: StateCopies | None = None

    @staticmethod
    def of(settings: Config, world: World) -> FaultKeeper | None:
        """Where a folder is named; all ranks of the world call it.

        Raises:
            ConfigError: copies are asked for that nobody would leave.
        """
        folder, is_redundant = settings.runtime.keep_on_fault, settings.memory.redundancy != "0"
        if folder is None:
            if is_redundant:
                raise ConfigError(
                    f"memory.redundancy: {settings.memory.redundancy} has no effect: nothing is left where ranks are lost",
                    hint="start the run by `whale run --elastic MIN:MAX`, which lets it go on from memory; or leave memory.redundancy out",
                )
            return None
        world.waits.linger_seconds = 0.0  # no launcher ends those that live: SIGTERM lets them leave what they hold
        atexit.register(gc.freeze)  # others wait until a rank has ended: to look for garbage in all that torch has made takes a second
        if not world.is_alone:
            world.waits.heed(Path(folder) / LOST)
        found = FaultKeeper(Path(folder), str(world.broadcast_object(uuid4().hex)))
        if is_redundant:
            hosts = list(map(str, world.gather_objects(f"{socket.gethostname()}:{folder}")))  # what is lost as one
            if world.rank == 0 and len(set(hosts)) == 1:
                survives = "nothing: there is no other rank" if world.is_alone else "the loss of a rank, not of the host: there is but one"
                warn(f"memory.redundancy: {settings.memory.redundancy} survives {survives}")
            if not world.is_alone:
                from whale.runtime.checkpoint.copies import StateCopies  # needed here alone

                found.copies = StateCopies(world, hosts)
        return found

    def check_room(self, num_bytes: int, *, warns: bool) -> None:
        """Looks whether copies of so many bytes, of all ranks of the host, could be left in its memory beside themselves."""
        if warns and num_bytes > (free := disk_usage(self.folder.parent).free):
            warn(
                f"memory.redundancy: where ranks are lost, copies of {format_bytes(num_bytes)} are left in {self.folder.parent}, which has "
                f"{format_bytes(free)} free: some will not be kept"
            )

    def rest(self) -> None:
        """A step is done."""
        self.begun, self.random, self.is_done = None, random_state(), False


def await_device(device: torch.device) -> None:
    """Waits until a GPU has done what it was asked to, no longer than `DEVICE_SECONDS`.

    Raises:
        CheckpointError: it takes longer.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    until = time.monotonic() + DEVICE_SECONDS
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() >= until:
            raise CheckpointError(f"{device} has not done its work within {DEVICE_SECONDS:g} s; it may wait for a rank that is gone")
        time.sleep(LOOK_SECONDS)


def devices_of(cluster: Cluster) -> list[str]:
    """What there is to plan for, as far as it is told."""
    return [f"{device.model} of {device.host}" for device in cluster.devices]


@dataclass(frozen=True)
class Fall:
    """What the launchers of this run saw last: when the first rank fell, in seconds of ``time.time()``, and the steps done by then.

    Of these nothing is known where no host had room to note them.
    """

    when: float
    step: int | None

    @staticmethod
    def of(folder: Path, world: World) -> Fall | None:
        """The first of all hosts; None where nothing has happened. All ranks of the world call it."""
        own = None
        with suppress(OSError):
            try:
                own = json.loads((folder / FALL).read_text())
            except ValueError:  # it is empty
                own = [(folder / FALL).stat().st_mtime, None]
        found: list[Any] = [each for each in world.gather_objects(own) if each is not None]
        return Fall(min(when for when, _ in found), max((step for _, step in found if step is not None), default=None)) if found else None


def tell_resumed(step: int, source: str, fall: Fall | None, before: Sequence[str], now: Sequence[str], reason: str) -> None:
    """Says where training goes on, and what was lost.

    Args:
        step: steps done.
        source: whence.
        fall: of the ranks before; None where none fell.
        before: devices then, if that is known.
        now: devices.
        reason: why no later step serves.
    """
    said = [f"goes on after step {step}, from {source}"]
    if fall is not None:
        steps = "an unknown number of steps" if fall.step is None else counted(max(fall.step - step, 0), "step")
        said.append(f"lost: {time.time() - fall.when:.1f} s, {steps}")
    if before:
        changes = (("gone", Counter(before) - Counter(now)), ("new", Counter(now) - Counter(before)))
        said += [f"{word}: {', '.join(f'{number} x {name}' for name, number in devices.items())}" for word, devices in changes if devices]
    if reason:
        said.append(reason)
    print(f"whale: {'; '.join(said)}", file=sys.stderr, flush=True)


def tell_kept(rank: int, step: int, size: int | Exception) -> None:
    """Says what a rank has left, or why it has not."""
    what = f"is kept in memory ({format_bytes(size)})" if isinstance(size, int) else f"is not kept: {_first_line(size)}"
    print(f"whale: step {step} of rank {rank} {what}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
