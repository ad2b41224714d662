"""Numbers as wide as sums over ranks are made: float64, and complex ones as two of them."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that values of a type are added up in."""
    return torch.complex128 if dtype.is_complex else torch.float64


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type that its values are added up in."""
    return tensor.to(wide(tensor.dtype))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, in the same memory; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_whole(dtype: torch.dtype) -> bool:
    """Whether values of a type are counts, so that a mean of them is rounded."""
    return not dtype.is_floating_point and not dtype.is_complex
