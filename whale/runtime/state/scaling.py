"""The scale of the loss in float16 training, and multiplying gradients by a number that only the device knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from whale.runtime.state.sparse_sums import dense_part

GROWTH_STEPS = 2000
"""The scale doubles after so many steps in a row with finite gradients, as that of `torch.amp.GradScaler`."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor on the loss that keeps float16 gradients from becoming zero.

    Attributes:
        value: a power of two, so that dividing gradients by it is exact.
        num_finite: steps with finite gradients since it last changed.
    """

    value: float = 2.0**16
    num_finite: int = 0

    def after(self, *, is_finite: bool) -> LossScale:
        """The scale of the next step: half where the gradients of this one were not finite, double after many that were."""
        if not is_finite:
            return LossScale(self.value / 2)
        done = self.num_finite + 1
        return LossScale(self.value * 2) if done == GROWTH_STEPS else LossScale(self.value, done)


def scale(factor: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Multiplies the gradients of parameters in place, all of one type and device in one call.

    Args:
        factor: 0-dim, on the device of this rank; it is not read here.
        parameters: those without a gradient are left alone.
    """
    for (gradients,) in by_type((dense_part(parameter.grad),) for parameter in parameters if parameter.grad is not None):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))


def by_type(rows: Iterable[tuple[torch.Tensor, ...]]) -> list[tuple[list[torch.Tensor], ...]]:
    """Tensors that go together, such as a gradient and its weight, as columns: one set of columns per device and type of the first."""
    found: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, ...]]] = {}
    for row in rows:
        found.setdefault((row[0].device, row[0].dtype), []).append(row)
    return [tuple(map(list, zip(*own, strict=True))) for own in found.values()]
