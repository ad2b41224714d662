"""The types in which values are summed over ranks: float64 and complex128."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide(tensor.dtype))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, in the same memory; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_whole(dtype: torch.dtype) -> bool:
    """Whether values of a type are integers, so that a mean of them is rounded."""
    return not dtype.is_floating_point and not dtype.is_complex
