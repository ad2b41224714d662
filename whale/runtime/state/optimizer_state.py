"""State of optimizers and schedulers by parameter name, so that any plan can take over the state of another plan.

A rank's optimizer, and so its scheduler, has groups of the parameters that the rank owns. Another plan, or rank, has other groups:

    rank 0   groups [embedding] [layer 0]     base_lrs [0.1, 0.2]
    rank 1   groups [layer 1]                 base_lrs [0.4]
    loaded   groups [layer 0, layer 1 ...]    each group's entry from where its parameters were
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from whale.errors import CheckpointError, first_few, raise_faults
from whale.runtime.state.joint import JointScheduler, members_of

_NO_SETTINGS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a group for its parameters or kernels; these may depend on the device."""


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps for each parameter."""

    # per parameter name, its entries (``exp_avg`` ...): tensors or plain data. Empty before the first step
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # per parameter name, the hyperparameters of its group (``lr`` ...); parameters of one group may share the mapping
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_optimizer(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor]) -> OptimizerState:
    """The state of an optimizer by name; the tensors are the optimizer's own.

    Args:
        optimizer: over some or all of the parameters, in any groups.
        parameters: this rank's parameters by name, the objects that the optimizer was built with.

    Raises:
        CheckpointError: its ``state_dict()`` has a form of its own.
    """
    if optimizer is None:
        return OptimizerState()
    # Through state_dict, not optimizer.state: optimizers may save another form, and hooks may change it.
    packed = optimizer.state_dict()
    if not {"state", "param_groups"} <= packed.keys():
        raise CheckpointError(
            f"state_dict() of {type(optimizer).__name__} has {first_few(sorted(map(str, packed)))}, not state and param_groups",
            hint="give several optimizers by name pattern: optimizer={'blocks.*.weight': make_one, '*': make_another}",
        )
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for group, members in zip(packed["param_groups"], group_members(optimizer, parameters), strict=True):
        shared = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for index, name in zip(group["params"], members, strict=True):
            options[name] = shared
            if index in packed["state"]:
                state[name] = dict(packed["state"][index])
    return OptimizerState(state, options)


def plain_settings(optimizer: torch.optim.Optimizer | None) -> list[dict[str, object]]:
    """Per group, the settings that are plain values and affect the result; reads nothing from a device."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [
        {key: plain for key in sorted(group) if key not in _NO_SETTINGS and (plain := _plain(group[key])) is not ...} for group in groups
    ]


def _plain(value: object) -> object:
    """A number, string, bool or tuple of them, equal in every process; `...` for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else ...
    if isinstance(value, (tuple, list)):
        plain = tuple(map(_plain, value))
        return ... if ... in plain else plain
    if value is None or isinstance(value, (bool, str)):
        return value
    return float(value) if isinstance(value, Real) else ...


def write_optimizer(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor], saved: OptimizerState) -> None:
    """Restores an optimizer from the state of another, which may have had more parameters.

    Args:
        optimizer, parameters: as for `read_optimizer`.
        saved: for at least the optimizer's parameters; its tensors become the optimizer's own.

    Raises:
        CheckpointError: parameters of one group were saved with different hyperparameters, or a parameter was saved without an
            optimizer.
    """
    if optimizer is None:
        return
    optimizer.load_state_dict(_fitted(optimizer, parameters, saved))
    _keep_types(optimizer, _names(parameters), saved)


def check_optimizer(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor], saved: OptimizerState) -> None:
    """Raises as `write_optimizer`, and changes nothing."""
    if optimizer is not None:
        _fitted(optimizer, parameters, saved)


def _fitted(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], saved: OptimizerState) -> dict[str, Any]:
    """An optimizer's own ``state_dict`` with the saved state in it."""
    packed = optimizer.state_dict()
    groups = []
    faults = []
    state: dict[int, Mapping[str, Any]] = {}
    for number, (group, members) in enumerate(zip(packed["param_groups"], group_members(optimizer, parameters), strict=True)):
        try:
            own = _common_options(number, members, saved.options)
            groups.append({**group, **{key: value for key, value in own.items() if key not in _NO_SETTINGS}})
        except CheckpointError as fault:
            faults.append(fault)
        state.update({index: saved.state[name] for index, name in zip(group["params"], members, strict=True) if name in saved.state})
    raise_faults(faults)
    return {**packed, "state": state, "param_groups": groups}


def group_members(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Per group of an optimizer, the names of its parameters."""
    names = _names(parameters)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _names(parameters: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in parameters.items()}


def _common_options(number: int, members: list[str], options: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    unknown = [name for name in members if name not in options]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} parameters of the optimizer are not in the saved one: {', '.join(unknown)}",
            hint="the optimizer was built over other parameters when the checkpoint was written",
        )
    for name in members[1:]:
        first, other = options[members[0]], options[name]
        differing = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if differing:
            key = differing[0]
            raise CheckpointError(
                f"parameters of group {number} were saved with different options ({key}: {first.get(key)!r} for {members[0]}, "
                f"{other.get(key)!r} for {name})",
                hint="build the optimizer with the parameter groups that it was saved with",
            )
    return options[members[0]] if members else {}


def _keep_types(optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: OptimizerState) -> None:
    """Undoes the cast of state to the parameter's type on loading: an fp32 average of a bf16 weight stays fp32."""
    for parameter, entries in optimizer.state.items():
        for key, value in saved.state.get(names[id(parameter)], {}).items():
            loaded = entries.get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                entries[key] = value.to(loaded.device, copy=True)


GROUPS, STATE, MEMBERS = "groups", "state", "members"


def read_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """A scheduler's ``state_dict`` and the names of the parameters in each group, as plain data; of several, by pattern."""
    if isinstance(scheduler, JointScheduler):
        members = members_of(optimizer)
        return {MEMBERS: {pattern: read_scheduler(own, members[pattern], parameters) for pattern, own in scheduler.members.items()}}
    return {GROUPS: group_members(optimizer, parameters), STATE: scheduler.state_dict()}


def fitted_state(
    scheduler: Any, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], saved: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The argument of a scheduler's ``load_state_dict``, from the states of others over the same parameters in other groups.

    Args:
        scheduler: over `optimizer`, of the same class as the saved ones.
        optimizer: over some or all of the parameters, each of which was with one of the saved ones.
        saved: one or more results of `read_scheduler`.
    """
    if isinstance(scheduler, JointScheduler):
        members, by_pattern = members_of(optimizer), {}
        for pattern, own in scheduler.members.items():
            if sources := [each[MEMBERS][pattern] for each in saved if pattern in each[MEMBERS]]:
                by_pattern[pattern] = fitted_state(own, members[pattern], parameters, sources)
        return by_pattern
    places = {name: (each, number) for each in saved for number, names in enumerate(each[GROUPS]) for name in names}
    sources = [places[names[0]] if names else (saved[0], None) for names in group_members(optimizer, parameters)]
    return _state(scheduler, [_Source(each[STATE], number, len(each[GROUPS])) for each, number in sources])


@dataclass(frozen=True)
class _Source:
    """The saved state of one group."""

    value: Any  # a saved state, or a part of it
    number: int | None  # of the group there; None for a group without parameters
    num_groups: int  # there

    def at(self, key: Any) -> _Source:
        return _Source(self.value[key], self.number, self.num_groups)


def _state(scheduler: Any, sources: Sequence[_Source]) -> dict[str, Any]:
    """A ``state_dict`` for a scheduler, from a source for each of its groups."""
    own, found = scheduler.state_dict(), {}
    for key in sources[0].value:
        inner, places = getattr(scheduler, key, None), [source.at(key) for source in sources]
        if isinstance(inner, list) and inner and all(hasattr(each, "load_state_dict") for each in inner):
            found[key] = [_state(each, [place.at(number) for place in places]) for number, each in enumerate(inner)]
        else:
            found[key] = _entry(own.get(key), places)
    return found


def _entry(own: Any, sources: Sequence[_Source]) -> Any:
    """An entry of a state: per group if it is a list of one value per group in all states, else common to all groups.

    A list that equals the new scheduler's everywhere (milestones, say) has the length of the groups by chance.
    """
    is_per_group = isinstance(own, list) and len(own) == len(sources)
    if not is_per_group or any(not isinstance(each.value, list) or len(each.value) != each.num_groups for each in sources):
        return sources[0].value
    if all(each.value == own for each in sources):
        return own
    return [value if source.number is None else source.value[source.number] for value, source in zip(own, sources, strict=True)]
