"""ZB-H2: twice the forwards ahead, so that weight gradients fill the bubble, wholly where 2 W = F + I."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.shape import Shape

# F, I and W equally long; 2 p - 1 activations on every stage
#
# rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
# rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
# rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5


def num_warm_up(shape: Shape, rank: int) -> int:
    """Forwards ahead of the first backward."""
    return min(2 * (shape.num_ranks - rank) - 1, shape.num_micro_batch)


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank: stage s runs its first W after backward number 2 s, then one after each backward."""
    num_ahead, m = num_warm_up(shape, rank), shape.num_micro_batch
    for micro_batch in range(num_ahead):
        yield Action(Kind.FORWARD, rank, micro_batch)
    for micro_batch in range(m):
        yield Action(Kind.BACKWARD_INPUT, rank, micro_batch)
        if micro_batch >= 2 * rank:
            yield Action(Kind.BACKWARD_WEIGHT, rank, micro_batch - 2 * rank)
        if micro_batch + num_ahead < m:
            yield Action(Kind.FORWARD, rank, micro_batch + num_ahead)
    for micro_batch in range(max(0, m - 2 * rank), m):
        yield Action(Kind.BACKWARD_WEIGHT, rank, micro_batch)


def peak(shape: Shape, rank: int) -> int:
    """What the first stage holds ahead of its first backward."""
    return min(2 * shape.num_ranks - 1, shape.num_micro_batch)


def waiting(shape: Shape, rank: int) -> int:
    """Stage s is 2 s backwards ahead of its W."""
    return min(2 * rank + 1, shape.num_micro_batch)


ZB_H2 = Builder("zb_h2", order, peak, waiting=waiting)
