"""Batch normalisation where each device holds some of the samples: sums are added over the group, forward and backward.

sum of the own part ---> leave, enter ---> mean of all ---> squares of the own part ---> leave, enter ---> variance of all
"""

from __future__ import annotations

import torch
from torch import Tensor

from whale.runtime.program.shard.communication import Group, enter, leave


def part_batch_norm(
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    share: float,
    group: Group,
) -> Tensor:
    """``batch_norm`` in training, on a part of the samples.

    Args:
        value: the own samples, ``[n channels ...]``.
        weight, bias, running_mean, running_var: per channel; the last two are moved as torch does.
        momentum: of the running statistics.
        eps: added to the variance.
        share: of all samples that this part has.
        group: the split group.
    """
    precise = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    dims = [dim for dim in range(value.dim()) if dim != 1]
    num_elements = round(value.numel() / value.shape[1] / share)
    mean = _over_all(precise.sum(dims), group) / num_elements
    centred = precise - _along(mean, value)
    variance = _over_all(centred.square().sum(dims), group) / num_elements
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (num_elements / max(num_elements - 1, 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    made = centred * _along((variance + eps).rsqrt(), value)
    made = made if weight is None else made * _along(weight, value)
    made = made if bias is None else made + _along(bias, value)
    return made.to(value.dtype)


def _over_all(own: Tensor, group: Group) -> Tensor:
    """The sum of the parts' values, which each part goes on to use by itself: so its gradients are summed too."""
    return enter(leave(own, group, "statistics"), group, "statistics")


def _along(channels: Tensor, value: Tensor) -> Tensor:
    return channels.reshape(-1, *(1,) * (value.dim() - 2))
