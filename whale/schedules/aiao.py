"""All in, all out: every micro-batch passes a chunk before the next chunk has its turn, so gradients sync early."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from whale.ir.schedule import Action, Kind
from whale.schedules.builder import Builder
from whale.schedules.shape import Shape

# 2 ranks, 2 chunks, 3 micro-batches; chunk 0 / chunk 1 as F / f and B / b, a backward as long as a forward.
# Chunk 1 is done with its gradients, and may sync them, while chunk 0 still runs backward.
#
# rank 0  F0 F1 F2 f0 f1 f2 .  b0 b1 b2 B0 B1 B2
# rank 1  .  F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2       aiao
# rank 1  .  F0 F1 F2 f0 b0 f1 b1 f2 b2 B0 B1 B2       aiao_early_loss: no logits are kept


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
