"""Early recomputation in which the last stage, whose backward follows its forward at once, recomputes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action
from whale.schedules import one_f_one_b
from whale.schedules.builder import Builder
from whale.schedules.recompute import before_backward
from whale.schedules.recompute_early import cool_down
from whale.schedules.shape import Shape

# rank 0  F0 F1 F2 ...                         as in recompute_early
# rank 1     F0 F1 R0 B0-- F2 R1 B1-- ...      R0 runs before the first gradient is there
# rank 2        F0 B0-- F1 B1-- F2 B2-- F3 B3--


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank."""
    last = shape.num_ranks - 1
    early = cool_down(shape, rank)
    if rank == last - 1:
        early.add((rank, 0))
    return before_backward(one_f_one_b.order(shape, rank), () if rank == last else (rank,), early)


LAST_NO_RECOMPUTE = Builder("last_no_recompute", order, one_f_one_b.peak)
