"""Going on from the newest state: what ranks have kept in memory after a fault, or the last checkpoint."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from whale.api.keeping import FaultKeeper, devices_of
from whale.comm import World, on_first_rank
from whale.errors import CheckpointError, warn
from whale.runtime.checkpoint.checkpoint import damage
from whale.runtime.checkpoint.surviving import DEVICES, SurvivingState, find_kept, forget_kept
from whale.runtime.checkpoint.training_state import newest_step
from whale.runtime.execute.status import FALL
from whale.units import counted


@dataclass(frozen=True)
class Fall:
    """What the launchers of this run saw last: when the first rank fell, in seconds of ``time.time()``, and the steps done by then.

    The steps are None where no host had room to note them.
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


def resume(folder: Path, keeper: FaultKeeper, load: Callable[[Path, SurvivingState | None], Any]) -> Any:
    """Loads the newest state, if there is one, and prints what was lost; all ranks of the world call it.

    Args:
        folder: of checkpoints.
        keeper: of the engine.
        load: reads a checkpoint, or in its place what hosts have kept.

    Returns:
        What the script saved as ``extra``.

    Raises:
        CheckpointError: the checkpoint does not fit, or all of the folder are damaged; of one that is damaged it warns.
    """
    roster = keeper.runtime.roster
    world, purpose, devices = roster.world, str(folder), devices_of(keeper.opening.attachment.cluster)
    kept, reason, fall = None, "", None
    if keeper.folder is not None:
        names = [each.name for each in keeper.opening.modes.train.graph.parameters if each.name in roster.plan.owners]
        kept, reason = find_kept(keeper.folder, purpose, names, world)
        fall = Fall.of(keeper.folder, world)
    before: list[str] = [] if kept is None else kept.value(f"extra.{DEVICES}")
    extra, source, damaged = None, "the start", dict[Path, CheckpointError]()
    while True:
        try:
            path, saved_step = on_first_rank(world, partial(newest_step, folder, damaged))
        except CheckpointError:
            if kept is None:
                raise
            path, saved_step = None, None
        if kept is not None and saved_step is not None and saved_step >= kept.step:
            held, why = None, ""  # of the same step the checkpoint has the script's own data, too
        else:
            held, why = kept, reason
        keeper.purpose = purpose  # no sooner: a rank that loses its peers before this has no step to go on from
        try:
            if held is not None:
                load(folder, held)
                source = f"memory of {counted(held.num_parts, 'rank')}"
            elif path is not None:
                extra, source = load(path, None), str(path)
            break
        except CheckpointError as error:
            if held is not None:
                kept, reason = None, f"the state kept in memory cannot be read: {error.message}"
                continue
            assert path is not None
            if (found := on_first_rank(world, partial(damage, path))) is None:
                raise  # it is as it was written, and does not fit: an older one would hide that
            if world.rank == 0:
                warn(f"{path} is passed over: {found}")
            damaged[path] = error
    kept, reason = held, why
    if world.rank == 0 and (path is not None or kept is not None or fall is not None or reason):
        say_resumed(keeper.state.step_number, source, fall, before, devices, reason)
    if keeper.folder is not None:
        keeper.copy_changes("resume")
        if keeper.copies is not None:
            keeper.copies.is_with_script = True
        world.barrier()  # all have read it
        forget_kept(keeper.folder, purpose)
    return extra


def say_resumed(step: int, source: str, fall: Fall | None, before: Sequence[str], now: Sequence[str], reason: str) -> None:
    """Prints where training goes on, and what was lost.

    Args:
        step: steps done.
        source: of the state.
        fall: of the ranks before; None where none fell.
        before, now: devices, where they are known.
        reason: why no later step serves.
    """
    parts = [f"resumes after step {step}, from {source}"]
    if fall is not None:
        steps = "an unknown number of steps" if fall.step is None else counted(max(fall.step - step, 0), "step")
        parts.append(f"lost: {time.time() - fall.when:.1f} s, {steps}")
    if before:
        changes = (("gone", Counter(before) - Counter(now)), ("new", Counter(now) - Counter(before)))
        parts += [f"{word}: {', '.join(f'{number} x {name}' for name, number in devices.items())}" for word, devices in changes if devices]
    if reason:
        parts.append(reason)
    print(f"whale: {'; '.join(parts)}", file=sys.stderr, flush=True)
