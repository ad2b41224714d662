"""Early recomputation in which the last stage, whose backward follows its forward at once, recomputes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.one_f_one_b import order as plain_order
from whale.schedules.orders.one_f_one_b import peak
from whale.schedules.orders.recompute_early import cool_down
from whale.schedules.orders.shape import Shape
from whale.schedules.recompute import before_backward

# R as long as F, B twice as long
#
# rank 0  F0 F1 F2             R0 B0--- F3 R1 B1--- R2 B2--- R3 B3---
# rank 1     F0 F1 R0    B0--- F2 R1 B1--- F3 R2 B2--- R3 B3---
# rank 2        F0 B0--- F1 B1--- F2 B2---    F3 B3---


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank."""
    last = shape.num_ranks - 1
    early = cool_down(shape, rank)
    if rank == last - 1:
        early.add((rank, 0))
    return before_backward(plain_order(shape, rank), () if rank == last else (rank,), early)


LAST_NO_RECOMPUTE = Builder("last_no_recompute", order, peak)
