"""What training changes, on one rank: it outlives the runtime that works on it, and is what a checkpoint holds.

It knows nothing of process groups or programs. A plan says which parts of which tensors it holds; another runtime for
the same plan takes it over as it is.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn

from whale.errors import ConfigError, warn
from whale.runtime.state.optimizer_state import plain_settings


class _Replaced(list[dict[str, Any]]):
    """The groups of an optimizer that the engine has replaced."""

    def __getitem__(self, _: Any) -> NoReturn:
        raise self._error()

    def __iter__(self) -> NoReturn:
        raise self._error()

    def _error(self) -> ConfigError:
        return ConfigError(
            "engine.replan made another optimizer, over the parameters that this rank has now (this one trains nothing any more)",
            hint="read engine.optimizer and engine.scheduler again after engine.replan",
        )


@dataclass
class EngineState:
    """The state of a training.

    Attributes:
        tensors: parameters and buffers that this rank owns, or its parts of them, by canonical name.
        optimizer: the user's, over the parameters; None if this rank owns none, or none was given.
        scheduler: the user's learning-rate scheduler; None likewise.
        step_number: steps done; with a seed it decides the random numbers of the next.
        position: where the data goes on, plain data of a loader, read from a checkpoint and not gone on from yet; else None.
        num_advanced: steps done since it was made, or loaded.
        noted_settings: of the optimizer, as the last step, or who made or loaded it, has left them.
        has_moved_statistics: whether steps have moved buffers (running statistics) on their owners, each by its own rows.
    """

    tensors: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    step_number: int = 0
    position: Mapping[str, int] | None = None
    num_advanced: int = 0
    noted_settings: list[dict[str, object]] = field(default_factory=list)
    has_moved_statistics: bool = False
    _is_advancing: bool = False
    _scheduled: int | None = None
    _has_told_of_schedule: bool = False

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that are trained, by name."""
        return {name: value for name, value in self.tensors.items() if isinstance(value, nn.Parameter)}

    @cached_property
    def _scheduler_reads_loss(self) -> bool:
        """Whether the scheduler's step needs a metric."""
        given = inspect.signature(self.scheduler.step).parameters.values()
        return any(each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in given)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that parameters have now, by name."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def forget_gradients(self) -> None:
        """Leaves no parameter a gradient."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def release(self, name: str) -> torch.Tensor | None:
        """Lets go of a tensor, which is somebody else's then; None where this rank owns nothing of it."""
        self.parameters.pop(name, None)
        return self.tensors.pop(name, None)

    def release_optimizer(self) -> None:
        """Lets go of the optimizer's state and parameters; who still has the optimizer at hand is told when he looks into it."""
        if self.optimizer is not None:
            self.optimizer.state = collections.defaultdict(dict)
            self.optimizer.param_groups = _Replaced()
        self.optimizer = self.scheduler = None

    def keep_to_itself(self) -> None:
        """Lets nobody else step the optimizer: whoever has it at hand, or gives it to a `GradScaler`, would apply gradients twice."""

        def check(*_: object) -> None:
            if not self._is_advancing:
                raise ConfigError(
                    "engine.step applies the gradients itself (the engine's optimizer was stepped once more)",
                    hint="leave out optimizer.step() and GradScaler.step(optimizer): engine.step(batch) is the whole step",
                )

        if getattr(self.optimizer, "_optimizer_step_pre_hooks", None) is not None:  # some, around another, are no whole Optimizer
            assert self.optimizer is not None
            self.optimizer.register_step_pre_hook(check)

    def advance(self, loss: torch.Tensor, *, applies: bool = True) -> None:
        """One step: applies the gradients that the parameters have, or leaves them out.

        Args:
            loss: of the step, for a scheduler that goes by it, as `torch.optim.lr_scheduler.ReduceLROnPlateau` does.
            applies: whether the gradients are applied.
        """
        if self.optimizer is not None and applies:
            self._is_advancing = True
            try:
                self.optimizer.step()
            finally:
                self._is_advancing = False
        if self.scheduler is not None and applies:
            self.scheduler.step(*([loss] if self._scheduler_reads_loss else []))
            self.note_schedule()
        self.noted_settings = self.settings
        self.step_number += 1
        self.num_advanced += 1
        self.has_moved_statistics = True

    @property
    def settings(self) -> list[dict[str, object]]:
        """The optimizer's, by group, as far as they are plain values."""
        return plain_settings(self.optimizer)

    def note_schedule(self) -> None:
        """Takes down where the scheduler stands, which has come there rightly."""
        self._scheduled = getattr(self.scheduler, "last_epoch", None)

    def look_at_schedule(self) -> None:
        """Warns, once, of a scheduler that somebody else has stepped since the last step."""
        now = getattr(self.scheduler, "last_epoch", None)
        if self._scheduled in (None, now) or self._has_told_of_schedule:
            return
        self._has_told_of_schedule = True
        warn(
            f"engine.step steps the scheduler itself (after the last step it stood at {self._scheduled}, now at {now}): leave out "
            "scheduler.step(); one that goes by epochs is made over engine.optimizer, and not given to parallelize"
        )
