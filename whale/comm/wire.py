"""Tensors as every backend moves them: in a type that it has, or as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

MOVED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})
"""Types that NCCL and Gloo both have; of booleans, int16, complex numbers and others one of them lacks some operation."""


def flat_bytes(tensor: Tensor) -> Tensor:
    """A tensor as bytes, in one dimension; a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def as_moved(tensor: Tensor) -> Tensor:
    """A contiguous tensor as it is moved: itself, or a view as bytes if it has another type than `MOVED`."""
    return tensor if tensor.dtype in MOVED else flat_bytes(tensor)
