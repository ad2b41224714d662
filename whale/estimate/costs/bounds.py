"""Closed forms of what a pipeline adds to the work of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whale.estimate.costs.line import Floats
from whale.schedules import BUILDERS
from whale.schedules.idle import RankPasses


def pipeline_seconds(
    schedule: str,
    rank_seconds: Sequence[float] | Sequence[Floats],
    num_micro_batch: int,
    num_chunks: int = 1,
    first_parts: Sequence[float] | None = None,
) -> Floats:
    """The time of all micro-batches of a step where only the sum of a rank's passes is known, one per case (0-dim for scalars).

    The passes are taken for equally long: F, the gradients of inputs and of weights, and what the order itself recomputes.

    Args:
        rank_seconds: per pipeline rank, forward and backward of one micro-batch over all its chunks; or arrays, for several
            cases at once.
        first_parts: per rank, the share of its first chunk, which the ranks after it wait for; None for equal chunks.
    """
    builder, ranks = BUILDERS[schedule], np.asarray(rank_seconds, dtype=np.float64)
    part = ranks / (4 if builder.recomputes else 3)
    first = None if first_parts is None else np.asarray(first_parts)
    recomputed = part if builder.recomputes else 0.0
    passes = RankPasses(part, ranks - part, part, num_micro_batch, num_chunks, recomputed, first=first)
    result: Floats = (num_micro_batch * ranks + builder.idle(passes)).max(axis=0)
    return result


def exposed_sync(
    schedule: str, seconds: float, backward: float, num_micro_batch: int, num_chunks: int = 1, group_size: int | None = None
) -> float:
    """Seconds of a rank's gradient all-reduce that backward passes cannot hide.

    A chunk's all-reduce starts at its last backward. The first chunk ends (v - 1) g B / v before the end of the step, where
    g micro-batches pass one chunk before the next; the last chunk is always exposed.

    Args:
        seconds: all-reduce of all chunks of a rank.
        backward: of all chunks of a rank for one micro-batch.
        group_size: of interleaving; None for all micro-batches.
    """
    if not BUILDERS[schedule].ends_by_chunk:
        return seconds
    group = num_micro_batch if group_size is None else group_size
    last_group = num_micro_batch % group or group
    return max(seconds / num_chunks, seconds - (num_chunks - 1) * last_group * backward / num_chunks)
