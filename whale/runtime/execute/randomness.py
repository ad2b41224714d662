"""Random numbers that depend on where they are drawn, not on when: equal under recompute and for equal plans."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*place: int | str) -> int:
    """A seed from a place such as (seed, step, micro-batch, replica, stage, device): a stable 63-bit hash."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draws from a seed of its own inside, and gives the generator back as it was. None changes nothing."""
    if seed is None:
        yield
        return
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
