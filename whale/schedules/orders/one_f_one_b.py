"""1F1B: a few forwards, then forward and backward in turn, so that no more activations live than the depth asks for."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.shape import Shape

# B as long as F; stage s keeps p - s activations
#
# rank 0  F0 F1 F2       B0 F3 B1    B2    B3
# rank 1     F0 F1    B0 F2 B1 F3 B2    B3
# rank 2        F0 B0 F1 B1 F2 B2 F3 B3


def num_warm_up(shape: Shape, rank: int) -> int:
    """Forwards ahead of the first pair: one for each stage that follows."""
    return min(shape.num_ranks - 1 - rank, shape.num_micro_batch)


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank; its only stage has the rank's number."""
    return in_turn(shape, rank, num_warm_up(shape, rank))


def in_turn(shape: Shape, rank: int, num_ahead: int) -> Iterator[Action]:
    """So many forwards, then forward and backward in turn."""
    for micro_batch in range(num_ahead):
        yield Action(Kind.FORWARD, rank, micro_batch)
    for micro_batch in range(shape.num_micro_batch):
        if micro_batch + num_ahead < shape.num_micro_batch:
            yield Action(Kind.FORWARD, rank, micro_batch + num_ahead)
        yield Action(Kind.BACKWARD, rank, micro_batch)


def peak(shape: Shape, rank: int) -> int:
    """As many as there are stages from here to the end."""
    return min(shape.num_ranks - rank, shape.num_micro_batch)


ONE_F_ONE_B = Builder("1f1b", order, peak)
