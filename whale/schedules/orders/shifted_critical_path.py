"""Recomputation off the critical path: the stage before the last does one more forward ahead, to wait for no gradient."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.one_f_one_b import order as plain_order
from whale.schedules.orders.one_f_one_b import peak as plain_peak
from whale.schedules.orders.recompute_early import cool_down
from whale.schedules.orders.shape import Shape
from whale.schedules.recompute import before_backward

# R as long as F, B twice as long; one activation more than in 1F1B on the stage before the last
#
# rank 0  F0 F1 F2 R0          B0--- F3 R1 B1--- F4 R2 B2--- R3 B3--- R4 B4---
# rank 1     F0 F1 F2 R0 B0--- R1 B1--- F3 R2 B2--- F4 R3 B3--- R4 B4---
# rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---    F4 B4---


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank: as in last_no_recompute, but for p - 2, and p - 3, which does R0 early too."""
    last = shape.num_ranks - 1
    early = cool_down(shape, rank)
    if rank in (last - 1, last - 2):
        early.add((rank, 0))
    actions = list(plain_order(shape, rank))
    if _is_shifted(shape, rank):
        early.add((rank, 1))  # it follows B0 at once, and its gradient is a forward and a backward behind that of 0
        third = actions.index(Action(Kind.FORWARD, rank, 2))
        actions.insert(2, actions.pop(third))
    return before_backward(actions, () if rank == last else (rank,), early)


def _is_shifted(shape: Shape, rank: int) -> bool:
    return rank == shape.num_ranks - 2 and shape.num_micro_batch > 2


def peak(shape: Shape, rank: int) -> int:
    """That of 1F1B, and one more on the stage before the last."""
    return plain_peak(shape, rank) + _is_shifted(shape, rank)


SHIFTED_CRITICAL_PATH = Builder("shifted_critical_path", order, peak)
