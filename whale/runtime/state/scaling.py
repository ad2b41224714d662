"""Multiplying gradients by a number that only the device knows."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def scale(factor: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Multiplies the gradients of parameters in place, all of one type in one call.

    Args:
        factor: 0-dim, on the gradients' device; it is not read here.
        parameters: those without a gradient are left alone.
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for dtype, gradients in by_type.items():
        torch._foreach_mul_(gradients, factor.to(dtype))
