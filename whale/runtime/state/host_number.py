"""Numbers on their way from a GPU to the host, which nobody waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

NUM_STEPS_AHEAD = 2
"""Steps that a GPU may lag behind the host: what a step computes is read so many steps later."""


@dataclass(frozen=True)
class HostCopy:
    """A number in flight from a GPU to the host, or arrived."""

    _value: torch.Tensor
    _arrived: torch.cuda.Event | None = None

    @staticmethod
    def of(number: torch.Tensor) -> HostCopy:
        """Starts an asynchronous copy of a 0-dim tensor."""
        if number.device.type == "cpu":
            return HostCopy(number)
        is_cuda = number.device.type == "cuda"
        value = torch.empty((), dtype=number.dtype, pin_memory=is_cuda)
        value.copy_(number, non_blocking=True)
        if not is_cuda:
            return HostCopy(value)
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
