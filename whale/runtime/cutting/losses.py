"""Cross-entropy where each device holds the logits of a part of the classes.

logits of the part ---> largest of all (no gradient) ---> sum of exponentials  --+
                                                          own target's logit   --+--> leave (one sum over the group)
"""

from __future__ import annotations

import torch
from torch import Tensor

from whale.axes.index_sets import Runs
from whale.runtime.cutting.communication import Group, largest, leave
from whale.runtime.cutting.lookups import localize

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for the reduction of a loss."""


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
    dim = min(1, logits.dim() - 1)
    precise = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    counts = target != ignored
    local, held = localize(torch.where(counts, target, 0), runs, size)
    shifted = precise - largest(_rowwise_max(precise, dim), group).unsqueeze(dim)
    wanted = shifted.gather(dim, local.unsqueeze(dim)).squeeze(dim) if runs else shifted.sum(dim)
    own = torch.stack([shifted.exp().sum(dim), wanted.masked_fill(~held, 0)])
    total, chosen = leave(own, group).unbind(0)
    losses = (total.log() - chosen).masked_fill(~counts, 0).to(logits.dtype)
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / counts.sum()


def _rowwise_max(logits: Tensor, dim: int) -> Tensor:
    if logits.shape[dim]:
        return logits.detach().amax(dim)
    return logits.detach().new_full([s for index, s in enumerate(logits.shape) if index != dim], -torch.inf)


def target_weight(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """The sum of the weights of class numbers: what a mean over them is divided by."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return weight[torch.where(counts, target, 0)].masked_fill(~counts, 0).sum()
