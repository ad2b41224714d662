"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.shape import Shape

# B as long as F
#
# rank 0  F0 F1 F2 F3             B0 B1 B2 B3
# rank 1     F0 F1 F2 F3       B0 B1 B2 B3
# rank 2        F0 F1 F2 F3 B0 B1 B2 B3


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank; its only stage has the rank's number."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for micro_batch in range(shape.num_micro_batch):
            yield Action(kind, rank, micro_batch)


def peak(shape: Shape, rank: int) -> int:
    """Every micro-batch is in flight between the last forward and the first backward."""
    return shape.num_micro_batch


GPIPE = Builder("gpipe", order, peak)
