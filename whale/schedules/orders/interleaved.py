"""Interleaved 1F1B: several chunks per rank take turns, group by group, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whale.errors import ConfigError
from whale.ir.schedule import Action, Kind
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.shape import Shape

# 2 chunks, groups of 2, B as long as F
#
# rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
# rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3


def turns(shape: Shape) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) in the order of the forwards: a group passes chunk after chunk, then the next group does."""
    for start in range(0, shape.num_micro_batch, shape.group_size):
        group = range(start, min(start + shape.group_size, shape.num_micro_batch))
        for chunk in range(shape.num_chunks):
            for micro_batch in group:
                yield chunk, micro_batch


def num_warm_up(shape: Shape, rank: int) -> int:
    """Forwards ahead of the first pair: the way to the end and back, and a group for each chunk but the last."""
    ahead = 2 * (shape.num_ranks - rank - 1) + (shape.num_chunks - 1) * shape.group_size
    return min(ahead, shape.num_micro_batch * shape.num_chunks)


def order(shape: Shape, rank: int) -> Iterator[Action]:
    """Computations of one rank; the backwards take the same turns with the chunks in reverse.

    A last group that is too small to run (see `num_vacant`) takes the turns of a larger one, with vacant places.
    """
    num_micro_batch = shape.num_micro_batch
    full = replace(shape, num_micro_batch=num_micro_batch + num_vacant(shape))
    return (action for action in _order(full, rank) if (action.micro_batch or 0) < num_micro_batch)


def num_vacant(shape: Shape) -> int:
    """Micro-batches that the last group is short of, to come round without a deadlock.

    With r left over for the last group, its first chunk is done on the last rank only after a backward that waits
    for the first rank, which waits for that chunk, wherever g + r < 2 p - 2 (and r > 1 if there are but two chunks).
    """
    left_over = shape.num_micro_batch % shape.group_size
    least = 1 if shape.num_chunks > 2 else 2
    if shape.num_chunks == 1 or shape.num_micro_batch < shape.group_size or left_over < least:
        return 0
    return max(0, 2 * shape.num_ranks - 2 - shape.group_size - left_over)


def _order(shape: Shape, rank: int) -> Iterator[Action]:
    stages = [chunk * shape.num_ranks + rank for chunk in range(shape.num_chunks)]
    table = list(turns(shape))
    forwards = [Action(Kind.FORWARD, stages[chunk], micro_batch) for chunk, micro_batch in table]
    backwards = [Action(Kind.BACKWARD, stages[-1 - chunk], micro_batch) for chunk, micro_batch in table]
    num_ahead = num_warm_up(shape, rank)
    yield from forwards[:num_ahead]
    for number, backward in enumerate(backwards):
        if number + num_ahead < len(forwards):
            yield forwards[number + num_ahead]
        yield backward


def peak(shape: Shape, rank: int) -> int:
    """The forwards of the warm-up and the one of the first pair."""
    return min(num_warm_up(shape, rank) + 1, shape.num_micro_batch * shape.num_chunks)


def check(shape: Shape) -> list[ConfigError]:
    """A smaller group would come round to the first rank before its first micro-batch does: a deadlock."""
    least = min(shape.num_ranks, shape.num_micro_batch)
    if shape.group_size >= least:
        return []
    rule = f"interleaving needs groups of at least {least} micro-batches, the smaller of ranks and micro-batches"
    return [
        ConfigError(
            f"{rule} (group size: {shape.group_size}, ranks: {shape.num_ranks}, micro-batches: {shape.num_micro_batch})",
            hint=f"a group size of {shape.num_ranks} is the usual one, {2 * shape.num_ranks} hides the latency of the links",
        )
    ]


INTERLEAVED = Builder("interleaved", order, peak, chunks=None, takes_group=True, check=check)
