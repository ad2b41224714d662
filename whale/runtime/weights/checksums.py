"""Checksums of tensors that ranks compare: exact to the bit, and equal on all device types."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements at a time, to limit memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15  # an odd constant that spreads positions over 64 bits


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A signed 64-bit digest per tensor; devices are synchronised once, at the end.

    It sums (bits of element i + 1) times an odd weight of i in wrapping 64-bit arithmetic, so the order of addition makes no
    difference, and neither does the device.
    """
    with torch.no_grad():
        digests = [_digest(tensor.detach()) for tensor in tensors.values()]
    return {name: int(digest.item()) for name, digest in zip(tensors, digests, strict=True)}


def _digest(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    bits = flat.view(torch.int64 if tensor.dtype.itemsize == 16 else _INTEGERS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=tensor.device) * _ODD | 1
        total += ((chunk + 1) * weights).sum()
    return total
