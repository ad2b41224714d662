"""A small number for the contents of a batch, by which ranks find out that they were given different ones.

It reads a sample of each tensor, so that a step pays microseconds for batches of any size: enough to tell other rows, or
the same rows in another order. It does not prove that two batches are equal to the last bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import reduce

import torch

SAMPLE = 1 << 13
"""Elements of a tensor that are looked at."""
BITS = 20
"""Of a digest: the squares of 8,192 ranks' digests are summed exactly in float64."""


def digests(leaves: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A digest of each tensor of a batch, by its name. What lies on a device is waited for."""
    return {name: _digest(leaf.detach()) for name, leaf in leaves.items()}


def combined(of_leaves: Mapping[str, int]) -> int:
    """The digests of all tensors as one of `BITS` bits."""
    mixed = reduce(lambda total, value: zlib.crc32(value.to_bytes(4, "little"), total), of_leaves.values(), 0)
    return mixed & ((1 << BITS) - 1)


def on_host(leaves: Mapping[str, torch.Tensor]) -> bool:
    """Whether a digest of a batch waits for no device."""
    return all(leaf.device.type == "cpu" for leaf in leaves.values())


def _digest(leaf: torch.Tensor) -> int:
    step = max(1, leaf.numel() // SAMPLE) | 1  # odd, so that it falls on other places of each row
    if leaf.is_contiguous():
        sample = leaf.view(-1)[::step]
    else:  # by places, so that nothing is copied but these
        sample = leaf[torch.unravel_index(torch.arange(0, leaf.numel(), step, device=leaf.device), leaf.shape)]
    return zlib.crc32(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
