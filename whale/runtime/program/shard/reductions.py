"""Reductions over a cut axis that are no sums: the largest, the smallest, the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whale.runtime.program.shard.communication import Group, gathered, largest, leave, smallest


def part_max(value: Tensor, dims: list[int], keepdim: bool, group: Group) -> Tensor:
    """The largest values along dimensions of which one is cut; the gradient is shared evenly among equal ones, as torch does."""
    return _extreme(value, value.amax(dims, keepdim=True), dims, keepdim, largest, group)


def part_min(value: Tensor, dims: list[int], keepdim: bool, group: Group) -> Tensor:
    """The smallest values along dimensions of which one is cut."""
    return _extreme(value, value.amin(dims, keepdim=True), dims, keepdim, smallest, group)


def _extreme(value: Tensor, own: Tensor, dims: list[int], keepdim: bool, choose: Callable[[Tensor, Group], Tensor], group: Group) -> Tensor:
    best = choose(own, group)
    if not value.requires_grad:
        return best if keepdim else best.squeeze(dims)
    is_best = value == best
    share = 1 / leave(is_best.sum(dims, keepdim=True), group).to(value.dtype)
    mean = (value.where(is_best, 0) * share).sum(dims, keepdim=True)  # carries the gradient; its value is `best` up to rounding
    whole = leave(mean, group)
    return whole if keepdim else whole.squeeze(dims)


def part_any(own: Tensor, group: Group) -> Tensor:
    """Whether any part says so."""
    return largest(own, group)


def part_all(own: Tensor, group: Group) -> Tensor:
    """Whether all parts say so."""
    return smallest(own, group)


def part_prod(own: Tensor, group: Group) -> Tensor:
    """The product of the parts' products: each device's factor carries its own gradient, the value is equal on all."""
    factors = gathered(own, group)
    others = [*factors[: group.position], *factors[group.position + 1 :]]
    own_way = own * torch.stack(others).prod(0) if others else own
    return own_way + (torch.stack(factors).prod(0) - own_way).detach()


FINISHES: dict[str, Callable[[Any, Any], Tensor]] = {"any": part_any, "all": part_all, "prod": part_prod}
"""How results for parts of a contracted axis become the whole result, where they are not added."""
