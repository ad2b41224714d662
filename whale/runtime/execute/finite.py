"""Detects a non-finite loss before it goes into the weights, and the ranks on which it arose.

On the host each loss is checked before the optimizer's step. A GPU is not waited for: there the host checks a loss two steps later, when
its copy has long arrived, and until then the device itself leaves out updates, where the optimizer can (`EngineState.masks`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import cast

import torch

from whale.comm import World
from whale.errors import RuntimeFault
from whale.runtime.execute.loss import LossAccount
from whale.runtime.state.host_copies import NUM_STEPS_AHEAD, LateNumber
from whale.runtime.state.scaling import LossScaling, note_non_finite
from whale.units import listed


class LossWatch:
    """Checks the losses of a training; all ranks see the same losses, and raise together."""

    def __init__(self, world: World, scaling: LossScaling | None = None) -> None:
        self._world, self._scaling = world, scaling
        self._copied: deque[tuple[int, LossAccount, LateNumber]] = deque()
        self._bad_step: int | None = None
        self._found: torch.Tensor | None = None  # above 0 on the device from the first loss on that is not finite
        self._last_free = -1  # number of the last step whose update was applied, whatever its loss

    def look(self, step_number: int, account: LossAccount, loss: torch.Tensor) -> None:
        """Checks a loss, or an earlier one.

        Raises:
            RuntimeFault: it is not finite.
        """
        if loss.device.type == "cpu":
            self._check(step_number, account, cast(float, loss.tolist()), "the update was not applied")
        else:
            self._copied.append((step_number, account, LateNumber.of(loss)))
            try:
                self.settle(NUM_STEPS_AHEAD)
            except RuntimeFault:
                self._copied.pop()  # its update is not made
                raise

    def stop(self, loss: torch.Tensor) -> torch.Tensor:
        """What an optimizer's step leaves itself out by: 1 on the device from the first loss on that is not finite, until `look` or
        `settle` has raised it, else 0.
        """
        if self._found is None:
            self._found = torch.zeros((), dtype=torch.float32, device=loss.device)
        note_non_finite([loss], self._found)
        return self._found

    def let_pass(self, step_number: int) -> None:
        """Notes that an update is applied, whatever its loss."""
        self._last_free = step_number

    def settle(self, num_left: int = 0) -> None:
        """Checks copied losses, and verdicts on scaled steps, except the last `num_left`; raises as `look`."""
        if self._scaling is not None:
            self._scaling.look(num_left)
        while len(self._copied) > num_left:
            step_number, account, loss = self._copied.popleft()
            is_free = step_number <= self._last_free
            if not math.isfinite(loss.read()):
                self._found = None
                if is_free:
                    self._bad_step = step_number  # peers may be lost while ranks report where it arose
            kept = "the weights have been updated with it since: load a checkpoint"
            self._check(step_number, account, loss.read(), kept if is_free else "this update and those since were not applied")

    def has_bad(self, num_steps: int) -> bool:
        """Whether a loss of the first `num_steps` steps, which is in the weights, is not finite; waits for nothing."""
        if self._bad_step is not None and self._bad_step < num_steps:
            return True
        applied = ((number, loss) for number, _, loss in self._copied if number <= self._last_free)
        return any(number < num_steps and loss.has_arrived and not math.isfinite(loss.read()) for number, loss in applied)

    def forget(self) -> None:
        """Drops the losses of weights that have been replaced."""
        self._copied.clear()
        self._bad_step, self._found, self._last_free = None, None, -1

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
