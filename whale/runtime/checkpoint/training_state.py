"""A training's state as a checkpoint, and back: from the state and who holds which part of it, without an engine.

Each rank writes the regions of parameters (and of their optimizer state) of which it is the lowest owner, and reads the regions that it
holds. In the checkpoint the tensors are whole, so any plan reads any other's.

The state of this process's random generators is kept: the script draws from them. Whale draws from seeds that depend on place and step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale.comm import together
from whale.errors import CheckpointError, warn
from whale.ir.graph import ModelGraph
from whale.ir.serialization import decode, to_json
from whale.runtime.checkpoint.boxes import find_shares
from whale.runtime.checkpoint.checkpoint import READ_AS, Extras, load, open_checkpoint
from whale.runtime.checkpoint.contents import Piece
from whale.runtime.checkpoint.files import STEP_KEY, by_age, torn
from whale.runtime.checkpoint.saving import Saving, save, snapshot
from whale.runtime.checkpoint.surviving import DEVICES, SurvivingState
from whale.runtime.execute.roster import Roster
from whale.runtime.state.engine_state import EngineState, without_own
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.joint import JointOptimizer, JointScheduler, members_of
from whale.runtime.state.optimizer_state import OptimizerState, check_optimizer, fitted_state, group_members, read_scheduler
from whale.runtime.state.scaling import LossScale


def random_state() -> dict[str, Any]:
    """The state of the generators, by the kind of device."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts back what `random_state` gave; that of a device which is not here is left out."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


SCHEDULER, KIND = "scheduler.", "kind."
"""Begin the keys under which each rank's scheduler is kept, and what kind of optimizer and scheduler there was."""
STEP, USERS, LEFT_OUT = STEP_KEY.removeprefix("extra."), "user", "non_persistent"
"""The keys of the steps done, of the user's own data, and of the buffers that no ``state_dict`` has."""


def save_state(
    path: Path,
    state: EngineState,
    roster: Roster,
    holdings: Holdings,
    model: ModelGraph,
    module: nn.Module,
    *,
    copies: bool,
    extra: object = None,
    keep: int | None = None,
    score: float | None = None,
) -> Saving:
    """Begins to write parameters, buffers, optimizer, scheduler, step, random state and data position; all ranks of the world call it.

    Args:
        module: the user's.
        copies, keep, score: as of `save`.
        extra: the user's own plain data; rank 0's is written.

    Raises:
        CheckpointError: it cannot be begun; the same on all ranks, and what stood at the path before is intact.
    """
    shared = _shared(state, roster, model, module)
    if roster.world.rank == 0 and extra is not None:
        shared[USERS] = extra
    writers = {name: min(roster.in_world(holdings.shardings.kept(name).mesh)) for name in holdings.shardings.parameters}
    if state.scheduler is not None and any(writers[name] == roster.world.rank for name in state.kept):
        assert state.optimizer is not None
        shared[f"{SCHEDULER}{roster.world.rank}"] = read_scheduler(state.scheduler, state.optimizer, state.kept)
    return save(
        path,
        tensors=state.lasting,
        optimizer=together(roster.world, state.read_kept),
        extras=Extras(shared, {"random": random_state()}),
        writers=writers,
        world=roster.world,
        plan=to_json(roster.plan, indent=2),
        shares=find_shares(holdings, roster.rank, model),
        copies=copies,
        keep=keep,
        score=score,
    )


def held_state(
    state: EngineState,
    roster: Roster,
    holdings: Holdings,
    model: ModelGraph,
    module: nn.Module,
    *,
    random: Mapping[str, Any],
    devices: Sequence[str],
    chosen: Mapping[str, Collection[int]] | None = None,
) -> tuple[list[Piece], dict[str, Any]]:
    """All that this rank holds, without communication (peers may be gone): pieces of tensors, and plain data by key.

    Args:
        module: the user's.
        random: what `random_state` gave when the step was done.
        devices: what there is to plan for.
        chosen: the pieces that are wanted, as of `find_shares`; None for all.
    """
    rank, shared = roster.world.rank, {**_shared(state, roster, model, module), DEVICES: list(devices)}
    if state.scheduler is not None and state.kept:
        assert state.optimizer is not None
        shared[f"{SCHEDULER}{rank}"] = read_scheduler(state.scheduler, state.optimizer, state.kept)
    tensors = {name: value for name, value in state.lasting.items() if chosen is None or name in chosen}
    shares = find_shares(holdings, roster.rank, model, writes_all=True, chosen=chosen)
    return snapshot(tensors, state.read_kept(), Extras(shared, {"random": random}), dict.fromkeys(tensors, rank), rank, shares)


def newest_step(folder: Path, damaged: Mapping[Path, CheckpointError]) -> tuple[Path | None, int | None]:
    """The checkpoint in a folder of the highest step that can be read, and the steps done in it; None for one of weights alone.

    Args:
        folder: of checkpoints; it may not exist.
        damaged: those that were tried, and what was found. It warns of others that are passed over.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    if "\0" in str(folder):  # else it would only seem to be empty
        raise CheckpointError(f"{str(folder)!r} cannot be read: a path has no NUL character")
    found = dict(damaged)
    for path in by_age(folder):
        if path not in found:
            try:
                step = open_checkpoint(path).value(STEP_KEY)
            except CheckpointError as error:
                found[path] = error
                warn(f"{path} is passed over: {error.message}")
                continue
            for other, its_step in torn(folder).items():
                if (its_step or 0) > (step or 0):
                    warn(f"{other}, of step {its_step}, is passed over: it is not complete any more")
            return path, step
    if found:
        raise next(iter(found.values()))
    return None, None


def _shared(state: EngineState, roster: Roster, model: ModelGraph, module: nn.Module) -> dict[str, Any]:
    """What a checkpoint has besides tensors, equal on all ranks except for schedulers and the user's own."""
    shared: dict[str, Any] = {STEP: state.step_number}
    if state.position is not None:
        shared["position"] = dict(state.position)
    if state.decay is not None:
        shared["decay"] = state.decay
    if state.scaling is not None:
        shared["loss_scale"] = asdict(state.scaling.scale)
    if left_out := _left_out(module, model):
        shared[LEFT_OUT] = left_out
    shared |= {f"{KIND}{what}": kind for what, kind in _kinds(state).items()}
    own = {each.name: each.spec.dtype for each in model.parameters}
    if others := {name: dtype for name, dtype in own.items() if roster.plan.state_of(name).kept.dtype != dtype}:
        shared[READ_AS] = others
    return shared


def load_state(
    path: Path,
    state: EngineState,
    roster: Roster,
    holdings: Holdings,
    model: ModelGraph,
    module: nn.Module,
    check_position: Callable[[Mapping[str, int]], None],
    *,
    kept: SurvivingState | None = None,
) -> Any:
    """Fills a state's tensors in place and restores everything else; all ranks of the world call it. Weights alone change nothing else.

    Args:
        module: the user's.
        check_position: raises where the data cannot go on as the checkpoint says.
        kept: what is read in place of the path.

    Returns:
        The user's own data in it; None without.

    Raises:
        CheckpointError: it is incomplete, damaged, of another model or optimizer, or of other data; the same type on all ranks.
            Nothing has changed.
    """

    def check(kept: OptimizerState, extras: Extras) -> None:
        if STEP not in extras.shared:
            return
        _check_forms(extras)
        _check_kinds(state, extras)
        check_optimizer(state.optimizer, state.kept, without_own(kept))
        _schedule(state, extras)
        if "position" in extras.shared:
            check_position(extras.shared["position"])

    specs = {parameter.name: parameter.spec for parameter in model.parameters if parameter.name in roster.plan.owners}
    shares = find_shares(holdings, roster.rank, model)
    found, extras = load(
        path,
        tensors=state.lasting,
        specs=specs,
        world=roster.world,
        shares=shares,
        ties={tie: parameter.name for parameter in model.parameters for tie in parameter.ties},
        may_lack=_left_out(module, model),
        check=check,
        opened=None if kept is None else kept.open(state.lasting, shares, roster.world),
    )
    if STEP not in extras.shared:
        return None
    state.take_kept(found)
    state.decay = extras.shared.get("decay", state.decay)
    if (schedule := _schedule(state, extras)) is not None:
        state.scheduler.load_state_dict(schedule)
        state.note_schedule()
    elif roster.world.rank == _first_to_train(roster, model):
        _tell_of_schedule(state, extras)
    state.note_settings()
    state.step_number, state.num_advanced = int(extras.shared[STEP]), 0
    state.position = extras.shared.get("position")
    if state.scaling is not None and "loss_scale" in extras.shared:
        state.scaling.restore(LossScale(**extras.shared["loss_scale"]))
    if "random" in extras.own:
        set_random_state(extras.own["random"])
    return extras.shared.get(USERS)


def _check_forms(extras: Extras) -> None:
    """Raises ValueError, TypeError or KeyError where what is restored last could fail, when tensors are filled already."""
    position = extras.shared.get("position")
    if position is not None and not (isinstance(position, Mapping) and all(type(each) is int for each in position.values())):
        raise ValueError(f"the position of the data is {position!r}")
    if not isinstance(extras.shared.get("decay", 0.0), (int, float)):
        raise ValueError(f"the decay of averages is {extras.shared['decay']!r}")
    if "loss_scale" in extras.shared:
        decode(LossScale, extras.shared["loss_scale"])
    for device, own in extras.own.get("random", {}).items():
        if not (isinstance(own, torch.Tensor) and own.dtype == torch.uint8):
            raise ValueError(f"the state of the {device} generator is a {type(own).__name__}")
    if "random" in extras.own:
        try:
            torch.Generator().set_state(extras.own["random"]["cpu"])
        except RuntimeError as error:
            raise ValueError(str(error)) from error


def _left_out(module: nn.Module, model: ModelGraph) -> list[str]:
    """The buffers that ``module.state_dict()`` leaves out, by first name."""
    found = (f"{place}.{name}".lstrip(".") for place, own in module.named_modules() for name in own._non_persistent_buffers_set)
    return sorted({model.parameter_by_name[name].name for name in found if name in model.parameter_by_name})


def _schedule(state: EngineState, extras: Extras) -> dict[str, Any] | None:
    """What this rank's scheduler goes on from; None where it has none, or none was saved."""
    saved = [value for key, value in extras.shared.items() if key.startswith(SCHEDULER)]
    if state.scheduler is None or not saved:
        return None
    assert state.optimizer is not None
    return fitted_state(state.scheduler, state.optimizer, state.kept, saved)


def _first_to_train(roster: Roster, model: ModelGraph) -> int | None:
    """The lowest rank of the world that has an optimizer, if parallelize was given one."""
    return min((roster.holders[name][0] for name in model.trained if name in roster.holders), default=None)


def _tell_of_schedule(state: EngineState, extras: Extras) -> None:
    """Warns of a schedule that does not go on, for there is none here, or was none there."""
    if state.scheduler is not None:
        here = type(state.scheduler).__name__
        warn(f"the checkpoint has no scheduler state: the scheduler of parallelize ({here}) starts from the beginning")
    elif state.optimizer is not None and (there := extras.shared.get(f"{KIND}scheduler")) is not None:
        warn(
            f"the checkpoint has the state of a scheduler ({there}), but parallelize was given none: learning rates stay as they were saved"
        )


def _kinds(state: EngineState) -> dict[str, str]:
    """The class names of what a rank trains with; of several optimizers also by parameter, of their schedulers by pattern."""
    used = {"optimizer": state.optimizer, "scheduler": state.scheduler}
    found = {what: type(own).__name__ for what, own in used.items() if own is not None}
    if isinstance(state.optimizer, JointOptimizer):
        found |= _by_parameter(state)
    if isinstance(state.scheduler, JointScheduler):
        found |= {f"scheduler of {pattern}": type(member).__name__ for pattern, member in state.scheduler.members.items()}
    return found


def _by_parameter(state: EngineState) -> dict[str, str]:
    members = members_of(state.optimizer).values()
    return {f"optimizer of {name}": type(own).__name__ for own in members for names in group_members(own, state.kept) for name in names}


def _check_kinds(state: EngineState, extras: Extras) -> None:
    """What one kind of optimizer or scheduler keeps is nothing that another goes on with."""
    saved = {key.removeprefix(KIND): kind for key, kind in extras.shared.items() if key.startswith(KIND)}
    here = _kinds(state)
    if JointOptimizer.__name__ in (here.get("optimizer"), saved.get("optimizer")) and (whole := saved.pop("optimizer", None)):
        by_parameter = _by_parameter(state)  # one optimizer for all is compared with several parameter by parameter
        here |= by_parameter
        saved = dict.fromkeys(by_parameter, whole) | saved
    if "scheduler" in saved:  # else it is warned of
        saved |= {what: "none" for what in here if what.startswith("scheduler of ") and what not in saved}
    for what, kind in here.items():
        if saved.get(what, kind) != kind:
            raise CheckpointError(
                f"the checkpoint has the state of another {what} ({saved[what]}, here: {kind})",
                hint="make it as it was when the checkpoint was written; engine.load_state_dict loads weights only",
            )
