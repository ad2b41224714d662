"""Random numbers that depend on where they are drawn, not on when: equal under recomputation and for equal plans.

Where torch compiles, and where unlike devices need equal numbers, each is a hash of a seed and the element's place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*place: int | str) -> int:
    """A stable 63-bit hash of a place such as (seed, step, micro-batch, replica, stage, device)."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that ops on a device draw from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws from a seed inside, and restores the generator after."""
    generator = generator_of(device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def dropout(value: torch.Tensor, rate: float, seed: int | torch.Tensor) -> torch.Tensor:
    """Dropout in training whose mask depends on the seed and the place of each element only."""
    if rate >= 1.0:
        return value * 0.0
    kept = uniform(value.shape, seed, value.device) >= rate
    return value * kept * (1.0 / (1.0 - rate))


def dropout_(value: torch.Tensor, rate: float, seed: int | torch.Tensor) -> torch.Tensor:
    """`dropout` in place."""
    if rate >= 1.0:
        return value.mul_(0.0)
    return value.mul_(uniform(value.shape, seed, value.device) >= rate).mul_(1.0 / (1.0 - rate))


def uniform(shape: tuple[int, ...], seed: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers in [0, 1), multiples of 2**-24: two rounds of lowbias32 (Wellons, 2018) of an element's place and a seed, a hash (`seed_of`).

    In 32 bits, which GPUs multiply in one instruction; torch 2.13 compiles 64 bits wrongly for a CPU, in what is left of a vector.
    """
    low, high = (_word(seed, shift) for shift in (0, 32))
    count = torch.Size(shape).numel()
    place = torch.arange(count, device=device, dtype=torch.int32) if count < 1 << 31 else torch.arange(count, device=device).to(torch.int32)
    found = _mixed(_mixed(place ^ low) + high)
    return (_shifted(found, 8).to(torch.float32) * 2.0**-24).reshape(shape)


def _word(seed: int | torch.Tensor, shift: int) -> int | torch.Tensor:
    """32 bits of a seed, as a signed number."""
    word = (seed >> shift & (1 << 32) - 1 ^ 1 << 31) - (1 << 31)
    return word.to(torch.int32) if isinstance(word, torch.Tensor) else word


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """One round of lowbias32."""
    value = (value ^ _shifted(value, 16)) * 0x7FEB352D
    value = (value ^ _shifted(value, 15)) * (0x846CA68B - (1 << 32))
    return value ^ _shifted(value, 16)


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted right as an unsigned number of 32 bits."""
    return (value >> by) & ((1 << (32 - by)) - 1)
