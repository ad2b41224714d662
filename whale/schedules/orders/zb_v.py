"""ZB-V: two chunks per rank in the shape of a V, no bubble where F = I = W, in the memory of 1F1B's first stage."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.shape import Shape, v_shape

# F, I and W equally long; 2 p chunk activations on every rank
#
# rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
# rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank.

    The order is laid out for at least 2 p - 1 micro-batches, which it needs to be full; of a smaller number
    the actions that there are run in that order.
    """
    for action in _full(Shape(shape.num_ranks, _num_laid_out(shape)), rank):
        if (action.micro_batch or 0) < shape.num_micro_batch:
            yield action


def _num_laid_out(shape: Shape) -> int:
    return max(shape.num_micro_batch, 2 * shape.num_ranks - 1)


def _full(shape: Shape, rank: int) -> Iterator[Action]:
    """Capitals are the chunk on the way down (stage r), small letters the one on the way up (stage 2p - 1 - r).

    Input and weight part follow each other except at the end, where the weight parts fill the gaps.
    """
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


def waiting(shape: Shape, rank: int) -> int:
    """At the end, where they fill the gaps of the last p; of the chunk on the way down."""
    num_of_last = shape.num_ranks - (_num_laid_out(shape) - shape.num_micro_batch)
    return max(1, min(rank + 1, num_of_last))


ZB_V = Builder("zb_v", order, peak, v_shape, chunks=2, waiting=waiting)
