"""The loss scale of float16 training, and scaling gradients by a number on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from whale.runtime.state.sparse_sums import dense_part

GROWTH_STEPS = 2000
"""Consecutive steps with finite gradients after which the scale doubles, as in `torch.amp.GradScaler`."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor on the loss that keeps float16 gradients from underflow."""

    value: float = 2.0**16  # a power of two, so that dividing gradients by it is exact
    num_finite: int = 0  # steps with finite gradients since it last changed

    def after(self, *, is_finite: bool) -> LossScale:
        """The scale of the next step: half after non-finite gradients, double after many finite ones."""
        if not is_finite:
            return LossScale(self.value / 2)
        done = self.num_finite + 1
        return LossScale(self.value * 2) if done == GROWTH_STEPS else LossScale(self.value, done)


def scale(factor: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Multiplies gradients in place by a 0-dim factor, which is not read on the host; one call per type and device."""
    for (gradients,) in by_type((dense_part(parameter.grad),) for parameter in parameters if parameter.grad is not None):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))


def by_type(rows: Iterable[tuple[torch.Tensor, ...]]) -> list[tuple[list[torch.Tensor], ...]]:
    """Rows of tensors as columns, grouped by device and type of the first."""
    found: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, ...]]] = {}
    for row in rows:
        found.setdefault((row[0].device, row[0].dtype), []).append(row)
    return [tuple(map(list, zip(*own, strict=True))) for own in found.values()]
