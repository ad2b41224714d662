"""Several optimizers, and their schedulers, as one: each steps the parameters whose names match its pattern.

    {"blocks.*.weight": muon, "*": adamw}      a parameter belongs to the first pattern that matches its name

A rank makes the optimizers of which it keeps parameters. Only an elementwise optimizer may step a part of a parameter.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from whale.errors import ConfigError, first_few
from whale.ir.patterns import first_match

Pattern = str


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers by the pattern of the names that each steps."""

    def __init__(self, members: Mapping[Pattern, torch.optim.Optimizer]) -> None:
        self.members = dict(members)
        self._is_made = False
        super().__init__([{"params": group["params"]} for group in self.param_groups], {})
        self._is_made = True

    # Read from the members each time: they replace their groups and state when they load.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members, one after another."""
        return [group for member in self.members.values() for group in member.param_groups]

    @param_groups.setter
    def param_groups(self, _: object) -> None: ...

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """What all members keep, by parameter."""
        return defaultdict(dict, chain.from_iterable(member.state.items() for member in self.members.values()))

    @state.setter
    def state(self, _: object) -> None: ...

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `ConfigError`: members are made with all of their groups."""
        if self._is_made:
            raise ConfigError(
                "add_param_group is not supported with optimizers by name pattern: make the group in the function of its pattern"
            )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the engine has computed the gradients"
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """That of one optimizer over the groups of all members."""
        state, groups = dict[int, Any](), list[dict[str, Any]]()
        for member in self.members.values():
            packed, offset = member.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {offset + index: entries for index, entries in packed["state"].items()}
            groups += [{**group, "params": [offset + index for index in group["params"]]} for group in packed["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        left, offset = list(state_dict["param_groups"]), 0
        for member in self.members.values():
            groups, left = left[: len(member.param_groups)], left[len(member.param_groups) :]
            indices = [index for group in groups for index in group["params"]]
            member.load_state_dict(
                {
                    "state": {index - offset: state_dict["state"][index] for index in indices if index in state_dict["state"]},
                    "param_groups": [{**group, "params": [index - offset for index in group["params"]]} for group in groups],
                }
            )
            offset += len(indices)


class JointScheduler:
    """Schedulers by the pattern of their optimizer; some members of a `JointOptimizer` may have none."""

    def __init__(self, members: Mapping[Pattern, Any]) -> None:
        self.members = dict(members)

    @property
    def last_epoch(self) -> tuple[Any, ...]:
        return tuple(getattr(member, "last_epoch", None) for member in self.members.values())

    def step(self, metric: torch.Tensor) -> None:
        """Steps all members; those that read a metric get it."""
        for member in self.members.values():
            member.step(*([metric] if reads_metric(member) else []))

    def state_dict(self) -> dict[Pattern, Any]:
        return {pattern: member.state_dict() for pattern, member in self.members.items()}

    def load_state_dict(self, state_dict: Mapping[Pattern, Any]) -> None:
        for pattern, member in self.members.items():
            if pattern in state_dict:
                member.load_state_dict(state_dict[pattern])


def reads_metric(scheduler: Any) -> bool:
    """Whether a scheduler's step needs a metric, as `torch.optim.lr_scheduler.ReduceLROnPlateau`."""
    given = inspect.signature(scheduler.step).parameters.values()
    return any(each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in given)


def members_of(optimizer: torch.optim.Optimizer | None) -> Mapping[Pattern, torch.optim.Optimizer]:
    """The optimizers that are stepped, by pattern; ``*`` for one that steps all."""
    if optimizer is None:
        return {}
    return optimizer.members if isinstance(optimizer, JointOptimizer) else {"*": optimizer}


def divided(names: Iterable[str], patterns: Iterable[Pattern]) -> dict[Pattern, list[str]]:
    """Per pattern, the names that it matches first. Raises ConfigError if none matches some name."""
    found: dict[Pattern, list[str]] = {pattern: [] for pattern in patterns}
    without: list[str] = []
    for name in names:
        first = first_match(found, name)
        (without if first is None else found[first]).append(name)
    if without:
        raise ConfigError(
            f"no pattern of optimizer= matches {first_few(without)} ({', '.join(map(repr, found))})",
            hint='a parameter goes to the first pattern that matches; end with "*": a function for all others',
        )
    return found


ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip

RUN_BYTES = 256 * 2**20
"""Most bytes of parameters that one call steps where it needs memory for as many, unless a single one is larger."""


def steps_many(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether kernels step many parameters at once, each element by itself: then runs of parameters may be stepped one after another.

    Such kernels (``foreach``, torch's default on a GPU) allocate as much as they step: Adam, AdamW and others a tensor for each
    parameter, which no plan counts.
    """
    members = members_of(optimizer).values()
    ways = [_takes_many(group) for each in members for group in each.param_groups if group["params"]]
    return all(type(each) in ELEMENTWISE for each in members) and True in ways and None not in ways


def runs_in_step(optimizer: torch.optim.Optimizer, own_hook: Callable[..., None]) -> list[list[torch.Tensor]]:
    """Parameters with gradients in runs, each for a call of ``step``; none where a hook may count the calls.

    Args:
        optimizer: one that `steps_many`.
        own_hook: what the engine has an optimizer call before each step.
    """
    members = members_of(optimizer).values()
    if any(_may_count(each, own_hook) for each in (optimizer, *members)):
        return []
    groups = [group for each in members for group in each.param_groups]
    runs, left = list[list[torch.Tensor]](), 0
    for each in (each for group in groups for each in group["params"] if each.grad is not None):
        left -= each.nbytes
        if left < 0 or not runs:
            runs.append([])
            left = RUN_BYTES - each.nbytes
        runs[-1].append(each)
    return runs


def _takes_many(group: Mapping[str, Any]) -> bool | None:
    """Whether one kernel steps many parameters of a group; None if that depends on which of them have gradients."""
    if group.get("foreach") is not None or group.get("fused"):
        return bool(group.get("foreach"))
    places = {each.is_cuda for each in group["params"]}
    return places.pop() if len(places) == 1 else None


def _may_count(optimizer: torch.optim.Optimizer, own_hook: Callable[..., None]) -> bool:
    """Whether something of the user's may be called at each step: a hook of the optimizer or of all, or what stands for its ``step``."""
    everywhere = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *everywhere)
    step = vars(optimizer).get("step")
    by_schedule = getattr(step, "_wrapped_by_lr_sched", False) and getattr(step, "__wrapped__", None) is type(optimizer).step
    return any(each != own_hook for own in hooks for each in own.values()) or not (step is None or by_schedule)


def check_elementwise(optimizer: torch.optim.Optimizer | None, shard: Sequence[str], by_keepers: Collection[str] = ()) -> None:
    """Refuses an optimizer that may mix the elements of a parameter, where parameters are cut.

    Args:
        shard: names of the parameters of which it has only a part.
        by_keepers: those of them that are sharded over their owners, not over the devices of a stage.

    Raises:
        ConfigError: it is none of torch's elementwise optimizers.
    """
    members = members_of(optimizer)
    for pattern, names in divided(shard, members).items() if members else ():
        kind = type(members[pattern])
        if names and kind not in ELEMENTWISE:
            listing = ", ".join(each.__name__ for each in ELEMENTWISE)
            whole = f"replicate what {kind.__name__} steps"
            if set(names) <= set(by_keepers):
                whole = "set memory.zero: 0: ranks then step whole parameters (memory.offload: optimizer has their state on hosts)"
            raise ConfigError(
                f"{kind.__name__} cannot step {names[0]}, of which this rank has a part: a cut parameter needs an elementwise optimizer",
                hint=f"use one of {listing}; or {whole}",
            )
