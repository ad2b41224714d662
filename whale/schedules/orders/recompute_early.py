"""1F1B that recomputes, and in its cool-down does so while the gradients are still on their way."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.one_f_one_b import num_warm_up, peak
from whale.schedules.orders.one_f_one_b import order as plain_order
from whale.schedules.orders.shape import Shape
from whale.schedules.recompute import before_backward

# R as long as F, B twice as long: R2 and R3 of rank 0, R3 of rank 1 run while their gradients are on the way
#
# rank 0  F0 F1 F2                   R0 B0--- F3 R1 B1--- R2 B2--- R3 B3---
# rank 1     F0 F1          R0 B0--- F2 R1 B1--- F3 R2 B2--- R3 B3---
# rank 2        F0 R0 B0--- F1 R1 B1--- F2 R2 B2--- F3 R3 B3---


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank: plain recomputation but for the last p - 1 - s micro-batches of stage s."""
    return before_backward(plain_order(shape, rank), (rank,), cool_down(shape, rank))


def cool_down(shape: Shape, rank: int) -> set[tuple[int | None, int | None]]:
    """(stage, micro-batch) of the backwards that no forward comes between."""
    m = shape.num_micro_batch
    return {(rank, micro_batch) for micro_batch in range(m - num_warm_up(shape, rank), m)}


RECOMPUTE_EARLY = Builder("recompute_early", order, peak)
