"""The two halves of the rows of a tensor, and the tensor from two halves.

[ outer x rows x inner ]   --->   [ outer x first rows x inner ]  [ outer x last rows x inner ]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int, int]
"""Dimension, outer, inner: where the rows are."""


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        ctx.place = place
        dim, outer, inner = place
        rows = value.shape[dim] // (outer * inner)
        split = _unfolded(value, dim, outer)
        parts = torch.split(split, [first_rows(rows) * inner, last_rows(rows) * inner], dim + 1)
        first, last = (part.flatten(dim, dim + 1) for part in parts)
        # No views for autograd, so in-place ops of the model may follow; contiguous as the whole was, so that views may.
        is_dense = dim == 0 and outer == 1
        return (first.detach(), last.detach()) if is_dense else (first.clone(), last.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return joined(gradients[0], gradients[1], ctx.place), None


def halves(value: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """The first rows of a tensor and the last ones; of an odd number the first half has one more."""
    found: tuple[Tensor, Tensor] = _Halves.apply(value, place)  # type: ignore[no-untyped-call]
    return found


def joined(first: Tensor, last: Tensor, place: Place) -> Tensor:
    """The tensor whose halves these are."""
    dim, outer, _ = place
    if outer == 1:
        return torch.cat([first, last], dim)
    return torch.cat([_unfolded(half, dim, outer) for half in (first, last)], dim + 1).flatten(dim, dim + 1)


def _unfolded(value: Tensor, dim: int, outer: int) -> Tensor:
    """The dimension as two: ``outer`` and the rest."""
    return value.reshape(*value.shape[:dim], outer, value.shape[dim] // outer, *value.shape[dim + 1 :])


def first_rows(num_rows: int) -> int:
    """How many of the rows are in the first half."""
    return num_rows - num_rows // 2


def last_rows(num_rows: int) -> int:
    """How many of the rows are in the second half."""
    return num_rows // 2
