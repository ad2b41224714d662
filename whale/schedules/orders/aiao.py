"""All in, all out: every micro-batch passes a chunk before the next chunk has its turn, so gradients sync early."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.shape import Shape

# 2 chunks, B as long as F. The later stage of a rank is done with its gradients, and may sync them,
# while the earlier one still runs backward.
#
# rank 0  0F0 0F1 0F2 2F0 2F1 2F2         2B0 2B1 2B2 0B0 0B1 0B2
# rank 1      1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
#
# The same with early loss: stage 3 keeps one micro-batch's logits only
#
# rank 0  0F0 0F1 0F2 2F0 2F1 2F2 2B0     2B1     2B2 0B0 0B1 0B2
# rank 1      1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2


def order(shape: Shape, rank: int, *, early_loss: bool) -> Iterator[Action]:
    """Computations of one rank, oldest micro-batch first in every chunk.

    Args:
        shape: the numbers.
        rank: which rank.
        early_loss: on the last stage of all, each backward follows its forward at once.
    """
    stages = [chunk * shape.num_ranks + rank for chunk in range(shape.num_chunks)]
    micro_batches = range(shape.num_micro_batch)
    early = stages.pop() if early_loss and rank == shape.num_ranks - 1 else None
    for stage in stages:
        yield from (Action(Kind.FORWARD, stage, micro_batch) for micro_batch in micro_batches)
    if early is not None:
        for micro_batch in micro_batches:
            yield Action(Kind.FORWARD, early, micro_batch)
            yield Action(Kind.BACKWARD, early, micro_batch)
    for stage in reversed(stages):
        yield from (Action(Kind.BACKWARD, stage, micro_batch) for micro_batch in micro_batches)


def peak(shape: Shape, rank: int, *, early_loss: bool) -> int:
    """Everything is in flight at the turn; with the early loss the last stage holds one micro-batch only."""
    if early_loss and rank == shape.num_ranks - 1:
        return shape.num_micro_batch * (shape.num_chunks - 1) + 1
    return shape.num_micro_batch * shape.num_chunks


AIAO = Builder("aiao", partial(order, early_loss=False), partial(peak, early_loss=False), chunks=None)
AIAO_EARLY_LOSS = Builder("aiao_early_loss", partial(order, early_loss=True), partial(peak, early_loss=True), chunks=None)
