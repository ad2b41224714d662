"""ZB-H1: 1F1B whose weight gradients wait, so that input gradients reach the earlier stages sooner."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.one_f_one_b import num_warm_up
from whale.schedules.orders.shape import Shape

# F, I and W equally long; p activations on every stage
#
# rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
# rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
# rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank: stage s runs its first W after backward number s, then one after each backward."""
    num_ahead, m = num_warm_up(shape, rank), shape.num_micro_batch
    for micro_batch in range(num_ahead):
        yield Action(Kind.FORWARD, rank, micro_batch)
    for micro_batch in range(m):
        if micro_batch + num_ahead < m:
            yield Action(Kind.FORWARD, rank, micro_batch + num_ahead)
        yield Action(Kind.BACKWARD_INPUT, rank, micro_batch)
        if micro_batch >= rank:
            yield Action(Kind.BACKWARD_WEIGHT, rank, micro_batch - rank)
    for micro_batch in range(max(0, m - rank), m):
        yield Action(Kind.BACKWARD_WEIGHT, rank, micro_batch)


def peak(shape: Shape, rank: int) -> int:
    """What 1F1B holds on its first stage."""
    return min(shape.num_ranks, shape.num_micro_batch)


def waiting(shape: Shape, rank: int) -> int:
    """Stage s is s backwards ahead of its W."""
    return min(rank + 1, shape.num_micro_batch)


ZB_H1 = Builder("zb_h1", order, peak, waiting=waiting)
