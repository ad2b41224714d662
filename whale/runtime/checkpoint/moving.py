"""A training's state from one plan to another in memory, name by name: what a checkpoint does by way of a disk.

told to all       what the optimizer keeps of no parameter's size (its count of steps), its options, the schedulers
resharded         parameters, buffers, and what the optimizer keeps for each of their elements
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whale.ir.graph import ModelGraph
from whale.runtime.execute.roster import Roster
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.optimizer_state import OptimizerState, read_optimizer, write_optimizer
from whale.runtime.state.perform import perform
from whale.runtime.state.scheduler_state import fitted_state, read_scheduler
from whale.sharding import reshard


@dataclass(frozen=True)
class Kept:
    """What the optimizers and schedulers of all ranks kept, as far as this rank goes on with it.

    Attributes:
        optimizer: for this rank's parameters.
        schedulers: of those that had one, what `read_scheduler` gave.
    """

    optimizer: OptimizerState
    schedulers: tuple[Mapping[str, Any], ...]

    def give(self, state: EngineState) -> None:
        """Lets the optimizer and the scheduler of a state go on from here."""
        write_optimizer(state.optimizer, state.parameters, self.optimizer)
        state.noted_settings = state.settings
        if state.scheduler is not None and self.schedulers:
            assert state.optimizer is not None
            state.scheduler.load_state_dict(fitted_state(state.scheduler, state.optimizer, state.parameters, self.schedulers))
            state.note_schedule()


@dataclass(frozen=True)
class _OfItsSize:
    """Stands for a tensor that an optimizer keeps of a parameter's size, in what is told to all."""

    dtype: torch.dtype


def move_state(
    state: EngineState, roster: Roster, holdings: Holdings, new_roster: Roster, new_holdings: Holdings, model: ModelGraph
) -> tuple[EngineState, Kept]:
    """The state under another plan of the same model on the same ranks; all ranks of the world call it. The old one is used up.

    Running statistics have been made equal on their owners.

    Args:
        state: of this rank, with nothing at work on it.
        roster, holdings: of the plan that it is under.
        new_roster, new_holdings: of the other plan.
        model: that both are for.

    Returns:
        The state without optimizer and scheduler, and what those go on from.

    Raises:
        RuntimeFault: a peer died, or a wait outlasted its limit. The state is lost then.
    """
    world = roster.world
    spaces = holdings if holdings.shardings.axes is not None else new_holdings  # a plan that shards nothing knows no axes
    kept = read_optimizer(state.optimizer, state.parameters)
    entries, options, schedulers = _told(state, kept, roster)
    state.release_optimizer()
    tensors: dict[str, Tensor] = {}
    moved: dict[str, dict[str, Any]] = {}
    for name in holdings.shardings.parameters:
        old = holdings.shardings.gradient(name).final.renumbered(roster.world_ranks)
        new = new_holdings.shardings.gradient(name).final.renumbered(new_roster.world_ranks)
        steps, whole = reshard(old, new), spaces.whole(model, name)
        own, mine = state.release(name), kept.state.pop(name, {}) if isinstance(kept.state, dict) else {}
        region, gets = old.held.get(world.rank), world.rank in new.held
        given = None if own is None else own.detach()
        value = perform(steps, whole, given, region, world, world.device)
        for key, told in entries.get(name, {}).items():
            if isinstance(told, _OfItsSize):
                told = perform(steps, replace(whole, dtype=told.dtype), mine.pop(key, None), region, world, world.device)
            if gets:
                moved.setdefault(name, {})[key] = told
        if gets:
            assert value is not None, f"this rank holds {name} under the other plan"
            trains = model.parameter_by_name[name]
            is_parameter = trains.kind == "parameter"
            made = nn.Parameter(value, requires_grad=trains.trainable) if is_parameter else value
            tensors[name] = own if own is not None and value is given else made
    return EngineState(tensors, step_number=state.step_number, position=state.position), Kept(OptimizerState(moved, options), schedulers)


def _told(
    state: EngineState, kept: OptimizerState, roster: Roster
) -> tuple[dict[str, dict[str, Any]], dict[str, Mapping[str, Any]], tuple[Mapping[str, Any], ...]]:
    """Per parameter, what its lowest owner's optimizer keeps and its options; and the schedulers of those that answer for any."""
    world = roster.world
    mine = [name for name in state.parameters if roster.holders[name][0] == world.rank]
    entries = {name: {key: _portable(value, state.tensors[name]) for key, value in kept.state.get(name, {}).items()} for name in mine}
    options = {name: kept.options[name] for name in mine if name in kept.options}
    scheduler = None
    if mine and state.scheduler is not None and state.optimizer is not None:
        scheduler = read_scheduler(state.scheduler, state.optimizer, state.parameters)
    found: list[Any] = world.gather_objects((entries, options, scheduler))
    return (
        {name: own for own_entries, _, _ in found for name, own in own_entries.items()},
        {name: own for _, own_options, _ in found for name, own in own_options.items()},
        tuple(each for _, _, each in found if each is not None),
    )


def _portable(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _OfItsSize(value.dtype) if value.dim() > 0 and value.shape == parameter.shape else value.detach().cpu()
