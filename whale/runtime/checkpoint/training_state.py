"""A training's state as a checkpoint, and back: no engine takes part, only the state and who holds which part of it.

Each rank writes the regions of parameters (and of what the optimizer keeps for them) that it is the lowest owner of, and
reads the regions that it holds. In between the tensors are whole, so any plan reads any other's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whale.errors import CheckpointError, warn
from whale.ir.graph import ModelGraph
from whale.ir.serialization import to_json
from whale.runtime.checkpoint.boxes import find_shares
from whale.runtime.checkpoint.checkpoint import Extras, load, save
from whale.runtime.execute.roster import Roster
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.optimizer_state import OptimizerState, check_optimizer, read_optimizer, write_optimizer
from whale.runtime.state.random_state import random_state, set_random_state
from whale.runtime.state.scheduler_state import fitted_state, read_scheduler

SCHEDULER, KIND = "scheduler.", "kind."
"""Begin the keys under which each rank's scheduler is kept, and what kind of optimizer and scheduler there was."""


def save_state(path: Path, state: EngineState, roster: Roster, holdings: Holdings, model: ModelGraph) -> None:
    """Writes parameters, buffers, optimizer, scheduler, step, random state and data position; all ranks of the world call it.

    Raises:
        CheckpointError: it cannot be written; the same on all ranks, and what stood at the path before is intact.
    """
    shared: dict[str, Any] = {"step": state.step_number}
    if state.position is not None:
        shared["position"] = dict(state.position)
    shared |= {f"{KIND}{what}": kind for what, kind in _kinds(state).items()}
    writers = {name: ranks[0] for name, ranks in roster.holders.items()}
    if state.scheduler is not None and any(writers[name] == roster.world.rank for name in state.parameters):
        assert state.optimizer is not None
        shared[f"{SCHEDULER}{roster.world.rank}"] = read_scheduler(state.scheduler, state.optimizer, state.parameters)
    save(
        path,
        tensors=state.tensors,
        optimizer=read_optimizer(state.optimizer, state.parameters),
        extras=Extras(shared, {"random": random_state()}),
        writers=writers,
        world=roster.world,
        plan=to_json(roster.plan, indent=2),
        shares=find_shares(holdings, roster.rank, model),
    )


def load_state(
    path: Path,
    state: EngineState,
    roster: Roster,
    holdings: Holdings,
    model: ModelGraph,
    check_position: Callable[[Mapping[str, int]], None],
    *,
    trust: bool = False,
) -> None:
    """Fills a state's tensors in place and puts everything else back; all ranks of the world call it.

    Args:
        check_position: raises where the data cannot go on as the checkpoint says.
        trust: whether a checkpoint of the older form may be unpickled, which can run code.

    Raises:
        CheckpointError: it is incomplete, damaged, of another model or optimizer, or of other data; the same kind on all ranks.
            Nothing has changed.
    """

    def check(kept: OptimizerState, extras: Extras) -> None:
        _check_kinds(state, extras)
        check_optimizer(state.optimizer, state.parameters, kept)
        _schedule(state, extras)
        if "position" in extras.shared:
            check_position(extras.shared["position"])

    specs = {parameter.name: parameter.spec for parameter in model.parameters if parameter.name in roster.plan.owners}
    shares = find_shares(holdings, roster.rank, model)
    kept, extras = load(path, tensors=state.tensors, specs=specs, world=roster.world, shares=shares, check=check, trust=trust)
    write_optimizer(state.optimizer, state.parameters, kept)
    if (schedule := _schedule(state, extras)) is not None:
        state.scheduler.load_state_dict(schedule)
        state.note_schedule()
    elif roster.world.rank == _first_to_train(roster, model):
        _tell_of_schedule(state, extras)
    state.noted_settings = state.settings
    state.step_number, state.num_advanced = int(extras.shared["step"]), 0
    state.position = extras.shared.get("position")
    if "random" in extras.own:
        set_random_state(extras.own["random"])


def _schedule(state: EngineState, extras: Extras) -> dict[str, Any] | None:
    """What this rank's scheduler goes on from; None where it has none, or none was saved."""
    saved = [value for key, value in extras.shared.items() if key.startswith(SCHEDULER)]
    if state.scheduler is None or not saved:
        return None
    assert state.optimizer is not None
    return fitted_state(state.scheduler, state.optimizer, state.parameters, saved)


def _first_to_train(roster: Roster, model: ModelGraph) -> int | None:
    """The lowest rank of the world that has an optimizer, if parallelize was given one."""
    return min((roster.holders[name][0] for name in model.trained if name in roster.holders), default=None)


def _tell_of_schedule(state: EngineState, extras: Extras) -> None:
    """Warns of a schedule that does not go on, for there is none here, or was none there."""
    if state.scheduler is not None:
        here = type(state.scheduler).__name__
        warn(f"the checkpoint was written without a scheduler: the one that parallelize was given ({here}) begins at its start")
    elif state.optimizer is not None and (there := extras.shared.get(f"{KIND}scheduler")) is not None:
        warn(
            f"the checkpoint was written with a scheduler ({there}), and parallelize was given none: learning rates stay as they were saved"
        )


def _kinds(state: EngineState) -> dict[str, str]:
    """The names of the classes of what a rank trains with."""
    used = {"optimizer": state.optimizer, "scheduler": state.scheduler}
    return {what: type(own).__name__ for what, own in used.items() if own is not None}


def _check_kinds(state: EngineState, extras: Extras) -> None:
    """What one kind of optimizer or scheduler keeps is nothing that another goes on with."""
    for what, here in _kinds(state).items():
        there = extras.shared.get(f"{KIND}{what}", here)
        if there != here:
            raise CheckpointError(
                f"training goes on with the kind of {what} that was saved (in the checkpoint: {there}, here: {here})",
                hint="make it as it was when the checkpoint was written; engine.load_state_dict takes the weights alone",
            )
