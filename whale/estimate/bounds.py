"""Closed forms of the pipeline schedules: the time of a step whose ranks are unequal.

    m x (time of the slowest rank)  +  bubble share x (time of the other ranks)

With equal ranks that is the familiar m (F + B) + (p - 1)(F + B) / v; with unequal ones and one chunk it is
(m - 1) max + sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whale.estimate.op_table import Floats

FORWARD_SHARE = 1 / 3
"""Share of F in F + B where B = 2 F, which prices the schedules that split the backward pass."""


def bubble_share(schedule: str, num_chunks: int = 1) -> float:
    """The part of its time per micro-batch that each further rank adds while the pipeline fills and drains."""
    shares = {"zb_h1": FORWARD_SHARE, "zb_h2": 0.0, "zb_v": 0.0, "interleaved": 1 / num_chunks, "aiao": 1 / num_chunks}
    shares["aiao_early_loss"] = shares["aiao"]
    return shares.get(schedule, 1.0)


def exposed_sync(
    schedule: str, seconds: float, backward: float, num_micro_batch: int, num_chunks: int = 1, group_size: int | None = None
) -> float:
    """What backward passes cannot hide of the gradient synchronisation of a rank.

    A chunk's synchronisation starts at its last backward. Of the first chunk to end, that is (v - 1) g B / v before the
    step's end, where g micro-batches pass one chunk before the next one has its turn; that of the last chunk is always
    exposed.

    Args:
        seconds: of the synchronisation of all chunks of a rank.
        backward: of all chunks of a rank for one micro-batch.
        group_size: of interleaving; None for as many micro-batches as there are.
    """
    if schedule not in ("interleaved", "aiao", "aiao_early_loss"):
        return seconds
    group = num_micro_batch if group_size is None else group_size
    last_group = num_micro_batch % group or group
    return max(seconds / num_chunks, seconds - (num_chunks - 1) * last_group * backward / num_chunks)


def pipeline_seconds(schedule: str, rank_seconds: Sequence[float] | Sequence[Floats], num_micro_batch: int, num_chunks: int = 1) -> Floats:
    """Time of all micro-batches of a step.

    Args:
        rank_seconds: per pipeline rank, forward and backward of one micro-batch over all its chunks; or arrays of
            these, for several cases at once.

    Returns:
        one time per case (an array of no dimension for plain numbers).
    """
    ranks = np.asarray(rank_seconds, dtype=np.float64)
    slowest = ranks.max(axis=0)
    result: Floats = num_micro_batch * slowest + bubble_share(schedule, num_chunks) * (ranks.sum(axis=0) - slowest)
    return result
