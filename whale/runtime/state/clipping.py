"""The global norm of the gradients, each parameter counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whale.comm import Groups


def global_norm(counted: Sequence[torch.Tensor], device: torch.device, groups: Groups, everyone: tuple[int, ...]) -> torch.Tensor:
    """The 2-norm over all gradients of the model, equal on every rank.

    Args:
        counted: the gradients that this rank answers for; every gradient has one such rank.
        device: where to compute.
        groups: holds the group of all ranks.
        everyone: all ranks of the world.

    Returns:
        A 0-dim float64 tensor.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in counted:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    work = groups.all_reduce(total, everyone)
    if work is not None:
        work.wait()
    return total.sqrt()


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scales gradients in place so that the global norm is at most `limit`, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
