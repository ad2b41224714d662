"""The offset of a rank's clock from rank 0's, with its error.

In an all-reduce no rank leaves before the last has entered, so all ranks are inside at some instant. By two clocks:

    rank 0   enter ---------------- leave            both intervals contain the instant, so
    rank r        enter ------ leave                 enter 0 - leave r  <=  clock 0 - clock r  <=  leave 0 - enter r

Each round narrows the bounds. Ranks of one machine share a clock, if the bounds allow it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from whale.comm.world import World

NUM_ROUNDS = 10
Stretch = tuple[float, float]
"""When a rank entered and left, by its own clock."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds to add to a rank's clock to get rank 0's, and by how much that may be wrong."""

    offset: float = 0.0
    error: float = 0.0


def compare_clocks(world: World) -> Clock:
    """The offset of this rank's `time.perf_counter`. A collective of the world, which ranks leave at about the same time."""
    if world.is_alone:
        return Clock()
    nothing, rounds = torch.zeros(1), list[Stretch]()
    with world.speaking("comparing clocks"):
        for _ in range(NUM_ROUNDS):
            start = perf_counter()
            dist.all_reduce(nothing)
            rounds.append((start, perf_counter()))
    first = world.broadcast_object((_machine(), rounds))
    assert isinstance(first, tuple)
    found = clock_between(rounds, first[1], is_same=_machine() == first[0])
    with world.speaking("comparing clocks"):
        dist.all_reduce(nothing)
    return found


def clock_between(own: Sequence[Stretch], reference: Sequence[Stretch], *, is_same: bool) -> Clock:
    """The clock that follows from the rounds of this rank and rank 0; `is_same`: both are on one machine."""
    low = max(there[0] - here[1] for here, there in zip(own, reference, strict=True))
    high = min(there[1] - here[0] for here, there in zip(own, reference, strict=True))
    if is_same and low <= 0.0 <= high:
        return Clock()
    return Clock((low + high) / 2, (high - low) / 2)


def _machine() -> str:
    """An identifier of the machine since its last boot."""
    return _BOOT.read_text() if _BOOT.exists() else str(uuid.getnode())
