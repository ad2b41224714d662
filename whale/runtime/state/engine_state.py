"""The state of a training on one rank: what a checkpoint holds. It outlives runtimes, and knows neither process groups nor programs."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from whale.errors import ConfigError, warn
from whale.runtime.state.joint import members_of, reads_metric, runs_in_step, steps_many
from whale.runtime.state.optimizer_state import OptimizerState, plain_settings, read_optimizer, write_optimizer
from whale.runtime.state.scaling import LossScaling, by_type
from whale.runtime.state.sparse_sums import added

_AVERAGE = "whale_average"
"""Key of a parameter's average among its optimizer state."""
_MOMENTUM = "whale_outer_momentum"
"""Key of a parameter's momentum in the outer optimizer there."""


def without_own(kept: OptimizerState) -> OptimizerState:
    """The optimizer's part of `EngineState.read_kept`."""
    own = _AVERAGE, _MOMENTUM
    state = {name: {key: value for key, value in entries.items() if key not in own} for name, entries in kept.state.items()}
    return OptimizerState({name: entries for name, entries in state.items() if entries}, kept.options)


class _Replaced(list[dict[str, Any]]):
    """The parameter groups of an optimizer that the engine has replaced: any access raises."""

    def __getitem__(self, _: Any) -> NoReturn:
        raise self._error()

    def __iter__(self) -> NoReturn:
        raise self._error()

    def _error(self) -> ConfigError:
        return ConfigError(
            "this optimizer was replaced by engine.replan and has no effect any more",
            hint="read engine.optimizer and engine.scheduler again after engine.replan",
        )


_MASKING = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernels take the number by which a step is left out."""


@dataclass
class EngineState:
    """The state of a training."""

    tensors: dict[str, torch.Tensor]  # this rank's parameters and buffers, or its parts of them, by canonical name, as ops read them
    # what the optimizer steps, by parameter: the same tensors unless `ParameterState` says otherwise; without what only other owners keep
    kept: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None  # the user's, over `kept`; None if this rank keeps nothing, or none was given
    scheduler: Any = None  # the user's learning-rate scheduler; None likewise
    step_number: int = 0  # finished steps; with a seed it decides the random numbers of the next
    position: Mapping[str, int] | None = None  # the loader's position from a checkpoint, until the loader resumes from it
    num_advanced: int = 0  # steps since this was made or loaded
    # of the optimizer, after the last step, or when made or loaded; not kept up to date where no other rank compares its own
    noted_settings: list[dict[str, object]] = field(default_factory=list)
    has_moved_statistics: bool = False  # whether buffers (running statistics) may differ between owners, each updated by its own rows
    scaling: LossScaling | None = None  # for float16; else None
    decay: float | None = None  # of the averages of weights; None for no averages
    averages: dict[str, torch.Tensor] = field(default_factory=dict)  # moving averages of `kept`, by name; empty before the first step
    num_local: int = 0  # steps since the weights of all sync groups were equal
    momenta: dict[str, torch.Tensor] = field(default_factory=dict)  # of `kept` in the outer optimizer, by name; empty before its first step
    keeps_momenta: bool = True  # whether the plan at work has an outer optimizer with momentum, or is not yet known
    is_whole: bool = True  # whether all of it belongs to one step: no update is in progress or was interrupted
    _is_advancing: bool = False
    _was_skipped: bool = False
    _scheduled: object = None
    _has_told_of_schedule: bool = False

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.tensors.items() if isinstance(value, nn.Parameter)}

    @cached_property
    def _scheduler_reads_loss(self) -> bool:
        return reads_metric(self.scheduler)

    @property
    def lasting(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: parameters as the optimizer steps them, and buffers."""
        found = {name: self.kept.get(name) if name in self.parameters else value for name, value in self.tensors.items()}
        return {name: value for name, value in found.items() if value is not None}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the optimizer's parameters, by name."""
        return {name: p.grad for name, p in self.kept.items() if p.grad is not None}

    def give_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sets these gradients and no others."""
        self.forget_gradients()
        for name, gradient in gradients.items():
            self.kept[name].grad = gradient

    def add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Adds to the gradients of the optimizer's parameters."""
        for name, gradient in gradients.items():
            parameter = self.kept[name]
            parameter.grad = gradient if parameter.grad is None else added(parameter.grad, gradient)

    def forget_gradients(self) -> None:
        """Sets all gradients to None."""
        for parameter in self._with_gradients:
            parameter.grad = None

    @cached_property
    def _with_gradients(self) -> list[nn.Parameter]:
        """The parameters that ops read and that the optimizer steps, each once."""
        return list({id(each): each for each in (*self.parameters.values(), *self.kept.values())}.values())

    def release(self, name: str) -> torch.Tensor | None:
        """Removes a tensor; returns what a checkpoint would hold of it, which then belongs to the caller. None if that is nothing."""
        self.parameters.pop(name, None)
        self.__dict__.pop("_with_gradients", None)
        held = self.tensors.pop(name, None)
        return self.kept.pop(name, None if isinstance(held, nn.Parameter) else held)

    def release_optimizer(self) -> None:
        """Drops the optimizer's state and parameters; later accesses to its groups raise."""
        for optimizer in members_of(self.optimizer).values():
            optimizer.state = collections.defaultdict(dict)
            optimizer.param_groups = _Replaced()
        self.optimizer = self.scheduler = None

    def forbid_outside_steps(self) -> None:
        """Makes steps of the optimizer from outside raise: by the user or a `GradScaler` they would apply gradients twice."""
        for optimizer in members_of(self.optimizer).values():
            if getattr(optimizer, "_optimizer_step_pre_hooks", None) is not None:  # some wrappers do not call Optimizer.__init__
                optimizer.register_step_pre_hook(self._check_from_inside)

    def _check_from_inside(self, *_: object) -> None:
        if not self._is_advancing:
            raise ConfigError(
                "the engine's optimizer was stepped outside engine.step",
                hint="leave out optimizer.step() and GradScaler.step(optimizer): engine.step(batch) is the whole step; after "
                "engine.forward_backward(batch) engine.update() applies the gradients",
            )

    @property
    def was_skipped(self) -> bool:
        """Whether the last update was skipped for non-finite loss or gradients; waits for the device."""
        return self._was_skipped if self.scaling is None else self.scaling.was_skipped

    @property
    def masks(self) -> bool:
        """Whether kernels of the optimizer leave out a step by a number on their device, as `torch.amp.GradScaler` hands it over: torch's
        fused ones. Momentum begins as 0 here, which damped momentum does not. Others have other contracts with a `GradScaler`.
        """
        members = members_of(self.optimizer).values()
        groups = [group for each in members for group in each.param_groups]
        damps = any(group.get("momentum") and group.get("dampening") for group in groups)
        return all(type(each) in _MASKING for each in members) and all(group.get("fused") for group in groups) and not damps

    def advance(self, loss: torch.Tensor, *, applies: bool = True, found: torch.Tensor | None = None) -> None:
        """One step: applies the gradients, or skips them.

        Args:
            loss: for a scheduler that reads it, as `torch.optim.lr_scheduler.ReduceLROnPlateau`.
            applies: whether the gradients are applied.
            found: on the device, 1 where they are not: for an optimizer that `masks`.
        """
        self.is_whole = False
        if self.optimizer is not None and applies:
            self._is_advancing = True
            try:
                if found is not None:
                    self._step_unless(found)
                elif self._steps_many:
                    self._step_in_parts()
                else:
                    self.optimizer.step()
            finally:
                self._is_advancing = False
            self._average()
        if self.scheduler is not None and (applies or self.scaling is not None):
            self.scheduler.step(*([loss] if self._scheduler_reads_loss else []))
            self.note_schedule()
        self._was_skipped = not applies
        self.step_number += 1
        self.num_advanced += 1
        self.is_whole = True

    @cached_property
    def _steps_many(self) -> bool:
        return steps_many(self.optimizer)

    def _step_in_parts(self) -> None:
        """Applies the gradients, of few parameters at a time where a call needs memory for as many as it steps."""
        assert self.optimizer is not None
        runs = runs_in_step(self.optimizer, self._check_from_inside)
        if len(runs) < 2:
            self.optimizer.step()
            return
        gradients = [[each.grad for each in run] for run in runs]
        for each in chain.from_iterable(runs):
            each.grad = None
        try:
            for run, own in zip(runs, gradients, strict=True):
                _give(run, own)
                self.optimizer.step()
                _give(run, [None] * len(run))
        finally:
            _give(chain.from_iterable(runs), chain.from_iterable(gradients))

    def _step_unless(self, found: torch.Tensor) -> None:
        assert self.optimizer is not None
        members = members_of(self.optimizer).values()
        for each in members:
            each.found_inf, each.grad_scale = found, None  # type: ignore[attr-defined]
            if isinstance(each, torch.optim.SGD):
                _begin_momentum(each)
        try:
            self.optimizer.step()
        finally:
            for each in members:
                del each.found_inf, each.grad_scale  # type: ignore[attr-defined]

    def _average(self) -> None:
        """Updates the averages like `torch.optim.swa_utils.get_ema_multi_avg_fn`; they start as the weights."""
        if self.decay is None:
            return
        if not self.averages:
            self.averages = {name: own.detach().clone() for name, own in self.kept.items()}
            return
        for averages, weights in by_type((average, self.kept[name].detach()) for name, average in self.averages.items()):
            torch._foreach_lerp_(averages, weights, 1 - self.decay)

    def swap_averages(self) -> None:
        """Exchanges the weights and their averages."""
        with torch.no_grad():
            for name, average in self.averages.items():
                weight = self.kept[name].detach()
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)

    def keep_momenta(self, *, keeps: bool) -> None:
        """Says whether the plan at work has an outer optimizer with momentum; without one there are none, loaded ones neither."""
        self.keeps_momenta = keeps
        if not keeps:
            self.momenta = {}

    def read_kept(self) -> OptimizerState:
        """The optimizer's state of each parameter, its average, and its momentum in the outer optimizer."""
        read = read_optimizer(self.optimizer, self.kept)
        found: dict[str, Mapping[str, Any]] = dict(read.state)
        for key, own in ((_AVERAGE, self.averages), (_MOMENTUM, self.momenta)):
            found |= {name: {**found.get(name, {}), key: value} for name, value in own.items()}
        return OptimizerState(found, read.options)

    def take_kept(self, saved: OptimizerState) -> None:
        """Restores the result of `read_kept` under any plan, for at least the parameters here; its tensors become this state's own.
        Raises CheckpointError as `write_optimizer` does.
        """
        write_optimizer(self.optimizer, self.kept, without_own(saved))
        self.averages, self.momenta = (
            {name: saved.state[name][key].to(kept.device) for name, kept in self.kept.items() if key in saved.state.get(name, {})}
            for key in (_AVERAGE, _MOMENTUM)
        )
        self.keep_momenta(keeps=self.keeps_momenta)
        self.num_local = 0

    def note_settings(self) -> None:
        """Notes the optimizer's settings, with which those of the next step are compared."""
        self.noted_settings = self.settings

    @property
    def settings(self) -> list[dict[str, object]]:
        """The optimizer's plain settings, by group."""
        return plain_settings(self.optimizer)

    def note_schedule(self) -> None:
        """Notes the scheduler's position, to notice steps from outside."""
        self._scheduled = getattr(self.scheduler, "last_epoch", None)

    def check_schedule(self) -> None:
        """Warns, once, if the scheduler was stepped from outside since the last step."""
        now = getattr(self.scheduler, "last_epoch", None)
        if self._scheduled in (None, now) or self._has_told_of_schedule:
            return
        self._has_told_of_schedule = True
        warn(
            f"the scheduler was stepped outside engine.step (from {self._scheduled} to {now}), which steps it itself: leave out "
            "scheduler.step(); make a scheduler that counts epochs over engine.optimizer and do not give it to parallelize"
        )


def _give(parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Begins momentum where there is none yet: a kernel that leaves out the first step would leave its memory as it was allocated."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
