"""Eager 1F1B: two forwards ahead for each stage that follows, so that no rank waits for the way of a message."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.one_f_one_b import in_turn
from whale.schedules.orders.shape import Shape

# B as long as F; stage s keeps 2 (p - s) - 1 activations
#
# rank 0  F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
# rank 1     F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
# rank 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5


def num_warm_up(shape: Shape, rank: int) -> int:
    """Forwards ahead of the first pair: one on each of the stages that follow, and one on its way to each."""
    return min(2 * (shape.num_ranks - 1 - rank), shape.num_micro_batch)


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank; its only stage has the rank's number."""
    return in_turn(shape, rank, num_warm_up(shape, rank))


def peak(shape: Shape, rank: int) -> int:
    """What is ahead, and the one that comes next."""
    return min(num_warm_up(shape, rank) + 1, shape.num_micro_batch)


EAGER_ONE_F_ONE_B = Builder("eager_1f1b", order, peak)
