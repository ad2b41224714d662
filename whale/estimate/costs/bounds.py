"""Lower bounds of the time of a step in closed form: what the search for a plan ranks by, never above the event simulation.

Rank r can start when the ranks before it have done the first forward pass, computes all its micro-batches, and after its
last backward pass the ranks before it still have theirs to do:

    the largest, over the ranks r, of    m x (time of r)  +  share x (time of all ranks before r)

The share is 1 where both the forward and the backward pass of those stand outside, 1 / v of v chunks, and so on. With equal
ranks and no messages that is exact for most schedules: m (F + B) + (p - 1) (F + B) / v.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whale.estimate.costs.op_table import Floats

FORWARD_SHARE = 1 / 3
"""Share of F in F + B where B = 2 F, for the schedules that split the backward pass: weight gradients fill their drain."""

RECOMPUTED_SHARE = 3 / 4
"""Share of F + B in F + R + B where R = F and B = 2 F, for the schedules that compute again before the gradient comes."""


def bubble_share(schedule: str, num_chunks: int = 1) -> float:
    """The part of the time per micro-batch of the ranks before it that passes while a rank cannot compute."""
    again = dict.fromkeys(("recompute_early", "last_no_recompute", "shifted_critical_path"), RECOMPUTED_SHARE)
    shares = again | {"zb_h1": FORWARD_SHARE, "zb_h2": FORWARD_SHARE, "zb_v": 0.0, "interleaved": 1 / num_chunks, "aiao": 1 / num_chunks}
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


def pipeline_seconds(
    schedule: str,
    rank_seconds: Sequence[float] | Sequence[Floats],
    num_micro_batch: int,
    num_chunks: int = 1,
    first_parts: Sequence[float] | None = None,
) -> Floats:
    """The least time of all micro-batches of a step.

    Args:
        rank_seconds: per pipeline rank, forward and backward of one micro-batch over all its chunks; or arrays of
            these, for several cases at once.
        first_parts: per rank, the part of its time that its first chunk takes, which is what the ranks after it wait for; None where
            chunks take equally long.

    Returns:
        one time per case (an array of no dimension for plain numbers).
    """
    ranks = np.asarray(rank_seconds, dtype=np.float64)
    first = ranks if first_parts is None else ranks * num_chunks * np.asarray(first_parts)
    before = np.cumsum(first, axis=0) - first
    result: Floats = (num_micro_batch * ranks + bubble_share(schedule, num_chunks) * before).max(axis=0)
    return result
