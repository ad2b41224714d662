"""Cross-entropy where each device holds the logits of a part of the classes.

logits of the part ---> largest, sum of exponentials, own target's logit ---> one all-gather of three numbers per target
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale.runtime.program.shard.communication import Group, gathered
from whale.runtime.program.shard.lookups import localize
from whale.sharding.index_sets import Runs

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for the reduction of a loss."""


class _Losses(torch.autograd.Function):
    """Per target ``log(sum of exponentials) - own logit``; backward is softmax minus one at the target, part by part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dim: int, local: Tensor, held: Tensor, group: Group) -> Tensor:
        precise = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        greatest = _rowwise_max(precise, dim)
        shift = greatest.masked_fill(greatest == -torch.inf, 0)  # a part may be masked out altogether
        exponentials = (precise - shift.unsqueeze(dim)).exp_()
        own = precise.gather(dim, local.unsqueeze(dim)).squeeze(dim) if logits.shape[dim] else torch.zeros_like(greatest)
        numbers = torch.stack([greatest, exponentials.sum(dim), own.masked_fill(~held, 0)])
        maxima, sums, chosen = torch.stack(gathered(numbers, group)).unbind(1)
        top = maxima.amax(0)
        total = (sums * (maxima - top).exp()).sum(0)
        ctx.dim, ctx.dtype = dim, logits.dtype
        ctx.save_for_backward(exponentials, (greatest - top).exp() / total, local, held)
        return total.log() + top - chosen.sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, scale, local, held = ctx.saved_tensors
        own = exponentials * (scale * gradients[0]).unsqueeze(ctx.dim)
        if exponentials.shape[ctx.dim]:
            own.scatter_add_(ctx.dim, local.unsqueeze(ctx.dim), -gradients[0].masked_fill(~held, 0).unsqueeze(ctx.dim))
        return own.to(ctx.dtype), None, None, None, None


def part_cross_entropy(logits: Tensor, target: Tensor, reduction: int, ignored: int, runs: Runs, size: int, group: Group) -> Tensor:
    """``cross_entropy`` with class numbers as targets, without class weights or label smoothing.

    Args:
        logits: of the classes held, ``[n classes ...]`` or ``[classes]``.
        target: class numbers, ``[n ...]`` or a scalar.
        reduction: torch's number.
        ignored: the target that counts for nothing.
        runs: the classes held.
        size: number of classes.
        group: the split group.
    """
    counts = target != ignored
    local, held = localize(torch.where(counts, target, 0), runs, size)
    found: Tensor = _Losses.apply(logits, min(1, logits.dim() - 1), local, held, group)  # type: ignore[no-untyped-call]
    losses = found.masked_fill(~counts, 0).to(logits.dtype)
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / counts.sum()


def _rowwise_max(logits: Tensor, dim: int) -> Tensor:
    if logits.shape[dim]:
        return logits.amax(dim)
    return logits.new_full([s for index, s in enumerate(logits.shape) if index != dim], -torch.inf)


def target_weight(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """The sum of the weights of class numbers: what a mean over them is divided by."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return weight[torch.where(counts, target, 0)].masked_fill(~counts, 0).sum()
