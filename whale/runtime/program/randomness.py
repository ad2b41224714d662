"""Random numbers that depend on where they are drawn, not on when: equal under recomputation and for equal plans."""

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
