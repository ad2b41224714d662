"""Detects a non-finite loss before it goes into the weights, and the ranks on which it arose.

On the host each loss is checked before the optimizer's step. A GPU is not waited for: there a loss is checked two steps later,
when its copy has long arrived.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import cast

import torch

from whale.comm import World
from whale.errors import RuntimeFault
from whale.runtime.execute.loss import LossAccount
from whale.units import listed

NUM_STEPS_AHEAD = 2
"""Steps that a GPU may lag behind the host."""


@dataclass(frozen=True)
class HostCopy:
    """A number in flight from a GPU to the host, or arrived."""

    _value: torch.Tensor
    _arrived: torch.cuda.Event | None = None

    @staticmethod
    def of(number: torch.Tensor) -> HostCopy:
        """Starts an asynchronous copy of a 0-dim tensor."""
        if number.device.type != "cuda":
            return HostCopy(number)
        value = torch.empty((), dtype=number.dtype, pin_memory=True)
        value.copy_(number, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return HostCopy(value, arrived)

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> float:
        """The number; waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast(float, self._value.tolist())


class LossWatch:
    """Checks the losses of a training; all ranks see the same losses, and raise together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._copied: deque[tuple[int, LossAccount, HostCopy]] = deque()
        self._bad_step: int | None = None

    def look(self, step_number: int, account: LossAccount, loss: torch.Tensor) -> None:
        """Checks a loss, or an earlier one.

        Raises:
            RuntimeFault: it is not finite.
        """
        if loss.device.type == "cpu":
            self._check(step_number, account, cast(float, loss.tolist()), "the update was not applied")
        elif loss.device.type == "cuda":
            self._copied.append((step_number, account, HostCopy.of(loss)))
            self.settle(NUM_STEPS_AHEAD)

    def settle(self, num_left: int = 0) -> None:
        """Checks copied losses except the last `num_left`; raises as `look`."""
        while len(self._copied) > num_left:
            step_number, account, loss = self._copied.popleft()
            if not math.isfinite(loss.read()):
                self._bad_step = step_number  # peers may be lost while ranks report where it arose
            self._check(step_number, account, loss.read(), "the weights have been updated with it since: load a checkpoint")

    def has_bad(self, num_steps: int) -> bool:
        """Whether a loss of the first `num_steps` steps, which is in the weights, is not finite; waits for nothing."""
        if self._bad_step is not None and self._bad_step < num_steps:
            return True
        return any(number < num_steps and loss.has_arrived and not math.isfinite(loss.read()) for number, _, loss in self._copied)

    def forget(self) -> None:
        """Drops the losses of weights that have been replaced."""
        self._copied.clear()
        self._bad_step = None

    def ranks_of(self, account: LossAccount) -> str:
        """The ranks whose own part of the loss is not finite, for a message. A collective of the world."""
        ranks = [rank for rank, is_finite in enumerate(self._world.gather_objects(account.is_finite)) if not is_finite]
        return f"on {listed('rank', ranks)}" if ranks else "on no single rank, only in the sum over ranks"

    def _check(self, step_number: int, account: LossAccount, loss: float, kept: str) -> None:
        if not math.isfinite(loss):
            raise RuntimeFault(
                f"the loss is {loss} at step {step_number + 1} {self.ranks_of(account)}; {kept}",
                hint="lower the learning rate, or set gradient.clip_norm; gradient.skip_nonfinite skips such steps, with a warning",
            )
