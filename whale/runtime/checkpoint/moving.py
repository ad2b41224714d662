"""A training's state from one plan to another in memory, name by name: what a checkpoint does through a disk.

sent to all       what the optimizer keeps that has not a parameter's size (its count of steps), its options, the schedulers
resharded         parameters, buffers, and what the optimizer keeps for each of their elements
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whale.comm import World
from whale.ir.graph import ModelGraph, Parameter
from whale.ir.plan import ParameterState
from whale.runtime.execute.roster import Roster
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.optimizer_state import OptimizerState, fitted_state, read_scheduler
from whale.runtime.state.perform import Whole, perform
from whale.runtime.state.publishing import home, in_forms
from whale.sharding import IndexSpace, Sharding, reshard


@dataclass(frozen=True)
class Kept:
    """What the optimizers and schedulers of all ranks kept, as far as this rank goes on with it."""

    optimizer: OptimizerState  # for this rank's parameters
    schedulers: tuple[Mapping[str, Any], ...]  # of those that had one, as of `read_scheduler`

    def give(self, state: EngineState) -> None:
        """Lets the optimizer and the scheduler of a state go on from here."""
        state.take_kept(self.optimizer)
        state.note_settings()
        if state.scheduler is not None and self.schedulers:
            assert state.optimizer is not None
            state.scheduler.load_state_dict(fitted_state(state.scheduler, state.optimizer, state.kept, self.schedulers))
            state.note_schedule()


@dataclass(frozen=True)
class _OfItsSize:
    """Stands for a tensor of a parameter's size in what is sent to all."""

    dtype: torch.dtype


def move_state(
    state: EngineState, roster: Roster, holdings: Holdings, new_roster: Roster, new_holdings: Holdings, model: ModelGraph
) -> tuple[EngineState, Kept]:
    """The state under another plan of the same model on the same ranks; all ranks of the world call it. The old one is used up.

    Running statistics have been made equal on their owners.

    Args:
        state: of this rank, with nothing at work on it.
        roster, holdings: of its plan.
        new_roster, new_holdings: of the other plan.
        model: of both.

    Returns:
        The state without optimizer and scheduler, and what those go on from.

    Raises:
        RuntimeFault: a peer died, or a wait timed out. The state is lost then.
    """
    world = roster.world
    kept = state.read_kept()
    state.averages, state.momenta = {}, {}
    entries, options, schedulers = _told(state, kept, roster, holdings)
    state.release_optimizer()
    tensors: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    moved: dict[str, dict[str, Any]] = {}
    for name in holdings.shardings.parameters:
        old, new = _Side.of(name, roster, holdings), _Side.of(name, new_roster, new_holdings)
        parameter, own, mine = model.parameter_by_name[name], state.release(name), {}
        if isinstance(kept.state, dict):
            mine = kept.state.pop(name, {})
        given, device = None if own is None else own.detach(), home(new.state.kept, world.device)
        for key, told in entries.get(name, {}).items():
            if isinstance(told, _OfItsSize):
                follows = told.dtype == getattr(torch, old.state.kept.dtype)
                dtype = getattr(torch, new.state.kept.dtype) if follows else told.dtype
                told = _brought(parameter, mine.pop(key, None), told.dtype, old.kept, new.kept, world, device, dtype)
            if world.rank in new.kept[0].held:
                moved.setdefault(name, {})[key] = told
        stored, lasting = (getattr(torch, form.dtype) for form in (old.state.kept, new.state.kept))
        read = lasting if new_roster.rank is None else new_holdings.read_type(name, new_roster.rank)
        if new.state.is_copied:
            value = _brought(parameter, given, stored, old.kept, new.kept, world, device, lasting)
            made |= {} if value is None else {name: value}
            value = _brought(parameter, value, lasting, new.kept, new.held, world, home(new.state.compute, world.device), read)
            value = value.clone() if value is made.get(name) and value is not None else value
        else:
            value = _brought(parameter, given, stored, old.kept, new.held, world, home(new.state.compute, world.device), read)
        if value is not None:
            as_it_was = own if value is given else None
            new_one = nn.Parameter(value, requires_grad=parameter.trainable) if parameter.kind == "parameter" else value
            tensors[name] = new_one if as_it_was is None else as_it_was
    forms = in_forms(new_holdings, new_roster.rank, tensors, world.device, made)
    found = EngineState(*forms, step_number=state.step_number, position=state.position, scaling=state.scaling, decay=state.decay)
    return found, Kept(OptimizerState(moved, options), schedulers)


_Lies = tuple[Sharding, IndexSpace]
"""Where elements lie, by ranks of the world, and what the axes of their regions are."""


@dataclass(frozen=True)
class _Side:
    """A parameter or buffer under one plan: its forms, and where the optimizer form and the compute form lie."""

    state: ParameterState
    kept: _Lies
    held: _Lies

    @staticmethod
    def of(name: str, roster: Roster, holdings: Holdings) -> _Side:
        shardings, ranks = holdings.shardings, roster.world_ranks
        kept, held = shardings.kept(name).renumbered(ranks), shardings.gradient(name).final.renumbered(ranks)
        return _Side(holdings.plan.state_of(name), (kept, shardings.space(name)), (held, shardings.space(name)))


def _brought(
    parameter: Parameter,
    value: Tensor | None,
    stored: torch.dtype,
    source: _Lies,
    target: _Lies,
    world: World,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:
    """This rank's part of a tensor under the new plan; unchanged where nothing changes.

    Where one side divides it along its axes and the other along its rows, it is whole on the way.
    """
    (before, own), (after, others) = source, target
    named = {*before.hull.axes, *after.hull.axes}
    space = next((space for space in (own, others) if named <= space.sizes.keys()), None)
    if space is None:
        middle = Sharding.whole(after.mesh[:1])
        value = _brought(parameter, value, stored, source, (middle, own), world, device, stored)
        return _brought(parameter, value, stored, (middle, others), target, world, device, dtype)
    whole = Whole(parameter.name, parameter.spec.shape, stored, space)
    found = perform(reshard(before, after), whole, value, before.held.get(world.rank), world, device)
    if found is None or world.rank not in after.held:
        return None
    found = found.to(device, dtype)
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def _told(
    state: EngineState, kept: OptimizerState, roster: Roster, holdings: Holdings
) -> tuple[dict[str, dict[str, Any]], dict[str, Mapping[str, Any]], tuple[Mapping[str, Any], ...]]:
    """Per parameter, what its lowest keeper's optimizer keeps and its options; and the schedulers of those keepers."""
    world = roster.world
    mine = [name for name in state.kept if min(roster.in_world(holdings.shardings.kept(name).mesh)) == world.rank]
    entries = {name: {key: _portable(value, state.kept[name]) for key, value in kept.state.get(name, {}).items()} for name in mine}
    options = {name: kept.options[name] for name in mine if name in kept.options}
    scheduler = None
    if mine and state.scheduler is not None and state.optimizer is not None:
        scheduler = read_scheduler(state.scheduler, state.optimizer, state.kept)
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
