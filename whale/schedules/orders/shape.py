"""What a builder is asked for: how many ranks, micro-batches and chunks, and the placements of stages on ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that a schedule is built from.

    Attributes:
        num_ranks: pipeline ranks (virtual devices), p.
        num_micro_batch: micro-batches of a step, m.
        num_chunks: stages per rank, v.
        group_size: micro-batches that pass one chunk before the next chunk has its turn, g.
    """

    num_ranks: int
    num_micro_batch: int
    num_chunks: int = 1
    group_size: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


def round_robin(shape: Shape) -> tuple[int, ...]:
    """Stage k on rank k mod p: chunk c of rank r is stage c p + r."""
    return tuple(stage % shape.num_ranks for stage in range(shape.num_stages))


def v_shape(shape: Shape) -> tuple[int, ...]:
    """Two stages a rank, down and up again: rank r has stages r and 2p - 1 - r."""
    down = tuple(range(shape.num_ranks))
    return down + down[::-1]
