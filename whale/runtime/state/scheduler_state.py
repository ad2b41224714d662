"""Loads a scheduler's state under other parameter groups: each group's entries follow the parameters of the group.

A rank's optimizer, and so its scheduler, has groups of the parameters that the rank owns. Another plan, or rank, has other groups:

    rank 0   groups [embedding] [layer 0]     base_lrs [0.1, 0.2]
    rank 1   groups [layer 1]                 base_lrs [0.4]
    loaded   groups [layer 0, layer 1 ...]    each group's entry from where its parameters were
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale.runtime.state.joint import JointScheduler, members_of
from whale.runtime.state.optimizer_state import group_members

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
