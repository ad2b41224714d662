"""ZB-V: two chunks per rank in the shape of a V, no bubble where F = I = W, in the memory of 1F1B's first stage."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.builder import Builder
from whale.schedules.shape import Shape, v_shape

# Capitals are the chunk on the way down (stage r), small letters the one on the way up (stage 2p - 1 - r).
# Input and weight part follow each other except at the end, where the weight parts fill the gaps.
#
# rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2
# rank 1  .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank.

    The order is laid out for at least 2 p - 1 micro-batches, which it needs to be full; of a smaller number
    the actions that there are run in that order.
    """
    for action in _full(Shape(shape.num_ranks, max(shape.num_micro_batch, 2 * shape.num_ranks - 1)), rank):
        if (action.micro_batch or 0) < shape.num_micro_batch:
            yield action


def _full(shape: Shape, rank: int) -> Iterator[Action]:
    p, m = shape.num_ranks, shape.num_micro_batch
    steps = _Steps(rank, 2 * p - 1 - rank)
    yield from steps.run("F" * (2 * (p - rank) - 1))  # until the first micro-batch is back from the turn
    yield from steps.run("fF" * rank)
    yield from steps.run("fiw" * (p - rank))
    num_ahead = 2 * p - 1 - rank  # forwards of the chunk down by now; the chunk up has done p of them
    yield from steps.run("FIWfiw" * (m - num_ahead))
    yield from steps.run("IWfiw" * (num_ahead - p))
    yield from steps.run("Ii" * rank)
    yield from steps.run("IW" * (p - rank))
    yield from steps.run("w" * rank)
    yield from steps.run("W" * rank)


class _Steps:
    """Counts micro-batches: each letter is the next one of its kind."""

    def __init__(self, down: int, up: int) -> None:
        letters = {"F": Kind.FORWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
        self.meaning = {letter: (kind, down) for letter, kind in letters.items()}
        self.meaning |= {letter.lower(): (kind, up) for letter, kind in letters.items()}
        self.counts = dict.fromkeys(self.meaning, 0)

    def run(self, letters: str) -> Iterator[Action]:
        for letter in letters:
            kind, stage = self.meaning[letter]
            yield Action(kind, stage, self.counts[letter])
            self.counts[letter] += 1


def peak(shape: Shape, rank: int) -> int:
    """In chunks, each half as large as a stage of 1F1B: p micro-batches' worth of both chunks, if there are enough."""
    return min(2 * shape.num_ranks, 2 * shape.num_micro_batch, shape.num_micro_batch + rank + 1)


ZB_V = Builder("zb_v", order, peak, v_shape, chunks=2)
