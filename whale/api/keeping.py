"""What a rank keeps of its training for the ranks that start again after it loses its peers.

With ``memory.redundancy: 1`` these are copies of the last steps too, which have what another host alone has held.
"""

from __future__ import annotations

import atexit
import gc
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from whale.api.loader import DataPosition
from whale.api.opening import Opening
from whale.errors import CheckpointError, ConfigError, WhaleError, warn
from whale.ir.cluster import Cluster
from whale.runtime.checkpoint.contents import Piece
from whale.runtime.checkpoint.surviving import keep_part
from whale.runtime.checkpoint.training_state import held_state, random_state
from whale.runtime.execute.call_check import Call
from whale.runtime.execute.status import LOST
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.training import Accumulated
from whale.units import format_bytes

if TYPE_CHECKING:
    from whale.runtime.checkpoint.copies import StateCopies, StepCopies

DEVICE_SECONDS = 5.0
"""How long a GPU may take for what was launched before its peers were lost; it may wait for one of them for ever."""

LOOK_SECONDS = 0.01
"""Between two looks whether it is done."""


class FaultKeeper:
    """Of one engine; all ranks of the world make it together. Without ``runtime.keep_on_fault`` it does nothing.

    Args:
        opening: of the plan at work.
        data: of the engine.

    Attributes:
        folder: in memory of this host; None where nothing is kept.
        training: an id of this start of the engine, equal on all ranks.
        purpose: the folder given to `Engine.resume`, which tells this engine from others of the script; None before that, and then
            nothing is kept.
        is_changing: whether a call that changes the state otherwise than by a step is under way, or was left in the middle.
        begun: the number of steps done, and where the data went on, before the step under way; None between steps.
        random: the state of the generators when the last step was done.
        is_done: whether this rank has left what it holds of the last step.
        copies: of the last steps, of this rank's state and that of other hosts; None where none are made.

    Raises:
        ConfigError: copies are asked for that nobody would leave.
    """

    opening: Opening
    state: EngineState
    runtime: Runtime

    def __init__(self, opening: Opening, data: DataPosition) -> None:
        settings, world = opening.settings, opening.world
        folder, self._redundancy = settings.runtime.keep_on_fault, settings.memory.redundancy
        self.folder, self.training, self._data = None if folder is None else Path(folder), "", data
        self.purpose: str | None = None
        self.is_changing = self.is_done = False
        self.begun: tuple[int, Mapping[str, int] | None] | None = None
        self.random: Mapping[str, Any] = {}
        self.copies: StateCopies | None = None
        self._warns_of_no_resume = self._redundancy != "0" and world.rank == 0
        if self.folder is None:
            if self._redundancy != "0":
                raise ConfigError(
                    f"memory.redundancy: {self._redundancy} has no effect: ranks that are lost leave nothing in memory",
                    hint="start the run by `whale run --elastic MIN:MAX`, which resumes from memory; or leave memory.redundancy out",
                )
            return
        self.random = random_state()
        world.waits.linger_seconds = 0.0  # no launcher ends those that live: SIGTERM lets them leave what they hold
        atexit.register(gc.freeze)  # others wait until a rank has ended: to look for garbage in all that torch has made takes a second
        if not world.is_alone:
            world.waits.heed(self.folder / LOST)
        self.training = str(world.broadcast_object(uuid4().hex))
        if self._redundancy != "0":
            if world.is_alone:
                warn(f"memory.redundancy: {self._redundancy} survives no loss: there is no other rank")
                return
            from whale.runtime.checkpoint.copies import StateCopies  # needed here alone

            hosts = world.gather_objects(f"{socket.gethostname()}:{folder}")  # what is lost as one
            self.copies = StateCopies(world, list(map(str, hosts)))

    # ---- while training --------------------------------------------------------------------------------------

    def check_settings(self, opening: Opening) -> None:
        """Raises a ConfigError where another opening wants copies and this one has none, or the reverse."""
        if (after := opening.settings.memory.redundancy) != self._redundancy:
            raise ConfigError(
                f"engine.replan: memory.redundancy: {after} has no effect, as training began with {self._redundancy}",
                hint="set it where whale.parallelize is called, or in the environment; memory.redundancy_steps may change",
            )

    def take_up(self, opening: Opening, state: EngineState, runtime: Runtime) -> None:
        self.opening, self.state, self.runtime = opening, state, runtime
        if self.copies is not None:
            self.copies.take_up(runtime.roster, runtime.holdings, opening.modes.train.graph)
            if self.copies.survives == "device" and opening.world.rank == 0 and self.purpose is None:
                warn(f"memory.redundancy: {self._redundancy} survives the loss of a rank, not of the host: there is only one host")
            if self.folder is not None and runtime.roster.world.local_rank == 0:
                check_room(self.folder, self.copies.fault_bytes)

    def begin_step(self, call: Call, batch: Any) -> None:
        """Before the first batch of a step, as `DataPosition.recognized` gives it; all ranks are in the same call. Needs a folder."""
        if self._warns_of_no_resume and self.purpose is None:
            warn("memory.redundancy has no effect: engine.resume was not called before the first step, so no run resumes from the copies")
        self._warns_of_no_resume = False
        position = self._data.before(batch)
        self.begun = self.state.step_number, position
        if self._is_due:
            self._copy_changes(call, position)

    def end_step(self) -> None:
        """After a step; needs a folder."""
        self.rest()
        if self.copies is not None and self.copies.follows_steps and self._is_due:
            self.copy_for_script()

    def rest(self) -> None:
        """The state is that of the last step."""
        if self.folder is not None:
            self.begun, self.random, self.is_done = None, random_state(), False

    @property
    def _is_due(self) -> bool:
        return self.state.step_number % self.opening.settings.memory.redundancy_steps == 0

    @contextmanager
    def changing(self, *harmless: type[WhaleError], copies_stay: bool = True) -> Iterator[None]:
        """Around what changes the state otherwise than by a step: where it ends in an error, nothing is kept of it.

        Args:
            harmless: errors after which nothing has changed.
            copies_stay: whether the training is still that of the copies.
        """
        self.is_changing = True
        if not copies_stay and self.copies is not None:
            self.copies.forget()
        try:
            yield
        except Exception as error:
            self.is_changing = not isinstance(error, harmless)
            raise
        self.is_changing = False

    # ---- copies ----------------------------------------------------------------------------------------------

    def copy_changes(self, call: Call) -> None:
        """Copies what no copies have: an initial state, or what the script wrote since the last step; all ranks are in the same call."""
        self._copy_changes(call, self._data.now)

    def copy_for_script(self) -> None:
        """Copies the state that the script goes on with; all ranks do so together."""
        if self.copies is not None and self.purpose is not None:
            self._copy(self.copies, self._data.now)
            self.copies.is_with_script = True

    def _copy_changes(self, call: Call, position: Mapping[str, int] | None) -> None:
        if (copies := self.copies) is None or self.purpose is None:
            return
        is_there = copies.has(number := self.state.step_number)
        with self.runtime.status.reporting():
            asks = is_there and self._is_written(copies)
        is_written = self.runtime.call_together(call, asks=asks)
        copies.is_with_script = False
        if is_written:
            copies.follows_steps = False
            copies.forget(number)
        if is_written or not is_there:
            self._copy(copies, position)

    def _copy(self, copies: StateCopies, position: Mapping[str, int] | None) -> None:
        with self.runtime.status.reporting():
            self.runtime.merge_statistics(self.state)
            self.runtime.status.set("copying the state")
            copies.make(self.state.step_number, *self.held(position, self.random, copies.duty.chosen))

    def _is_written(self, copies: StateCopies) -> bool:
        """Whether the script, where it has taken over, has changed what this rank has copies of."""
        return copies.is_with_script and not copies.are_of(*self.held(None, self.random, copies.duty.chosen))

    def held(
        self, position: Mapping[str, int] | None, random: Mapping[str, Any], chosen: Mapping[str, Collection[int]] | None = None
    ) -> tuple[list[Piece], dict[str, Any]]:
        return held_state(
            replace(self.state, position=position),
            self.runtime.roster,
            self.runtime.holdings,
            self.opening.modes.train.graph,
            self.opening.modes.model,
            random=random,
            devices=devices_of(self.opening.attachment.cluster),
            chosen=chosen,
        )

    # ---- after a fault ---------------------------------------------------------------------------------------

    def leave(self, accumulated: Accumulated | None) -> None:
        """Keeps the last whole step, as far as this rank holds it, and its copies in memory of the host; prints so, or why it cannot.

        A rank in the middle of an update or another change, or whose GPU does not finish, keeps copies alone. What a loss that is not
        finite may have reached is not kept.

        Args:
            accumulated: batches that wait for an update.
        """
        if self.folder is None or self.purpose is None or self.is_done:
            return
        state, copies = self.state, self.copies
        ways: list[tuple[int, Callable[[], int]]] = []
        if copies is not None:  # those of the end of a step are not of the state that the script has made of it
            usable = copies.steps[1:] if copies.has(state.step_number) and self._may_be_written(copies) else copies.steps
            ways += [(each.step, partial(self._keep_copies, each)) for each in usable]
        if state.is_whole and not state.num_local and not self.is_changing:
            ways.insert(1, (state.step_number, partial(self._keep_state, accumulated)))  # behind the copies of which most are whole
        self.is_done = bool(ways)
        for step, keep in ways:
            size: int | Exception
            try:
                size = keep()
            except Exception as error:  # a GPU's too: the fault that led here says more
                size = error
            _say_kept(self.runtime.roster.world.rank, step, size)

    def _may_be_written(self, copies: StateCopies) -> bool:
        """As `_is_written`, where peers may be lost, and a GPU wait for them."""
        if copies.is_with_script:
            try:
                await_device(self.runtime.roster.world.device)
                return self._is_written(copies)
            except Exception:  # a GPU's too: then it is unknown
                return True
        return False

    def _keep_copies(self, copies: StepCopies) -> int:
        return self._write(f".{copies.number}_{copies.step}", copies.step, copies.pieces, copies.plain)

    def _keep_state(self, accumulated: Accumulated | None) -> int:
        random, position = self.random, self._data.now
        if self.begun is not None:
            number, before = self.begun
            if number == self.state.step_number:
                position = before
                if accumulated is not None:
                    accumulated.buffers.put_back()
            else:  # its update was done
                random = random_state()
        await_device(self.runtime.roster.world.device)
        if self.runtime.roster.world.waits.has_lost_device:
            raise CheckpointError("the device was freed of its waits for lost ranks, and has gone on with what was not received")
        number = self.state.step_number
        return self._write(f"_{number}", number, *self.held(position, random), self.runtime.unmerged(self.state))

    def _write(self, name: str, step: int, pieces: Sequence[Piece], plain: Mapping[str, Any], lacks: Sequence[str] = ()) -> int:
        """Writes a part into memory of the host, under one name on all ranks; the number of bytes."""
        if self.runtime.losses.has_bad(step):
            raise CheckpointError("the loss of one of the last steps is not finite, and may have changed the weights")
        assert self.folder is not None and self.purpose is not None, "else nothing is kept"
        rank = self.runtime.roster.world.rank
        return keep_part(self.folder, f"{self.training}{name}", self.purpose, pieces, plain, rank=rank, lacks=lacks)


def check_room(folder: Path, num_bytes: int) -> None:
    """Warns where the copies of all ranks of the host, and the state that they hold, could not be left in its memory."""
    if num_bytes > (free := disk_usage(folder.parent).free):
        warn(
            f"memory.redundancy: what ranks leave when others are lost ({format_bytes(num_bytes)}) does not fit in {folder.parent} "
            f"({format_bytes(free)} free): some will not be kept"
        )


def await_device(device: torch.device) -> None:
    """Waits until a GPU has done what was launched; a CheckpointError after `DEVICE_SECONDS`."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    until = time.monotonic() + DEVICE_SECONDS
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() >= until:
            raise CheckpointError(
                f"{device} has not finished its work within {DEVICE_SECONDS:g} s; it may be waiting for a rank that is gone"
            )
        time.sleep(LOOK_SECONDS)


def devices_of(cluster: Cluster) -> list[str]:
    """What there is to plan for."""
    return [f"{device.model} of {device.host}" for device in cluster.devices]


def _say_kept(rank: int, step: int, size: int | Exception) -> None:
    what = f"is kept in memory ({format_bytes(size)})" if isinstance(size, int) else f"is not kept: {_first_line(size)}"
    print(f"whale: step {step} of rank {rank} {what}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
