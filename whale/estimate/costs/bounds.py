"""Closed forms below the simulated time of a step, by which the search ranks.

Rank r starts after the first forward pass of the ranks before it, computes all its micro-batches, and after its last
backward pass the ranks before it still have theirs:

    max over the ranks r of    m x (time of r)  +  share x (time of all ranks before r)

The share is 1 if both passes of those ranks lie outside, 1 / v with v chunks, and so on. With equal ranks and no
messages this is exact for most schedules: m (F + B) + (p - 1) (F + B) / v.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whale.estimate.costs.line import Floats

FORWARD_SHARE = 1 / 3  # F / (F + B) with B = 2 F, for schedules that split the backward pass: weight gradients fill their drain

LEFT_OVER = 0.9  # cost of an incomplete last group of interleaving, in missing micro-batches per rank

UNEVEN = 0.15  # zb_v has no slack: ranks that differ a little wait about this much of a micro-batch, times the number of ranks

RECOMPUTED_SHARE = 3 / 4  # (F + B) / (F + R + B) with R = F and B = 2 F, for schedules that recompute before the gradient arrives


def bubble_share(schedule: str, num_chunks: int = 1) -> float:
    """The share of the earlier ranks' time per micro-batch during which a rank cannot compute."""
    recomputed = dict.fromkeys(("recompute_early", "last_no_recompute", "shifted_critical_path"), RECOMPUTED_SHARE)
    shares = recomputed | {
        "zb_h1": FORWARD_SHARE,
        "zb_h2": FORWARD_SHARE,
        "zb_v": 0.0,
        "interleaved": 1 / num_chunks,
        "aiao": 1 / num_chunks,
    }
    shares["aiao_early_loss"] = shares["aiao"]
    return shares.get(schedule, 1.0)


def idle_seconds(
    schedule: str,
    forward: Floats,
    backward: Floats,
    weights: Floats,
    num_micro_batch: Floats | int,
    num_chunks: int = 1,
    *,
    recomputed: Floats | float = 0.0,
    hops: Floats | float = 0.0,
    alive: Floats | None = None,
    num_ranks: int | None = None,
) -> Floats:
    """Seconds of a step that each rank waits: ``[ranks, cases]``.

    For 1F1B, with t = F + B: until the ranks before it have started, and until they are done; before its first backward
    pass and after its last forward pass, until what it sent returns, less what it does meanwhile; and with few
    micro-batches in flight, in each turn:

        t_1 + ... + t_k-1  +  (after - (alive - 1) F)+  +  (after - (alive - 1) B)+  +  (m - alive) ((t + after) / alive - t)+

    where `after` is the time on the ranks behind it, with the messages. Exact for equal ranks (except ``zb_h2``, ``zb_v``
    and chunks of few micro-batches).

    Args:
        forward, backward, weights: seconds of one micro-batch over all chunks, ``[ranks, cases]``; `weights` is the part of
            `backward` that is weight gradients.
        num_micro_batch: of a step; one for all cases, or of each.
        recomputed: the part of `backward` that the schedule itself recomputes.
        hops: seconds of a message from each rank to the next.
        alive: per rank, the most micro-batches in flight, ``[ranks, 1]``; None ignores that limit.
        num_ranks: where several ranks are added up in one row.
    """
    p, m = forward.shape[0] if num_ranks is None else num_ranks, num_micro_batch
    found: Floats
    own, inputs, hops = forward + backward, backward - weights, np.zeros_like(forward) + hops
    lacking = np.maximum(0, p - m)  # too few micro-batches to fill the pipeline with

    def before(seconds: Floats) -> Floats:
        passed: Floats = np.cumsum(seconds, axis=0) - seconds
        return passed

    def mean(seconds: Floats) -> Floats:
        total: Floats = seconds.sum(axis=0)
        return total / p

    if schedule in ("interleaved", "aiao", "aiao_early_loss"):
        lacking = np.where((schedule == "interleaved") & (lacking == 0) & (np.asarray(m) % p > 0), LEFT_OVER * p, lacking)
        found = before(own) / num_chunks + lacking * (1 - 1 / num_chunks) * mean(own) + 2 * (num_chunks + 1) * hops.sum(axis=0)
        return found
    if schedule == "zb_v":
        missing = lacking - np.maximum(0, m - p) / 2
        slack = before(inputs + np.maximum(forward - weights, 0.0)) + missing * mean(weights)
        found = np.maximum(before(np.maximum(forward, inputs)) / 2, slack) + 4 * hops.sum(axis=0) + UNEVEN * p * mean(own)
        return found
    sooner = {"recompute_early": 0, "last_no_recompute": 2, "shifted_critical_path": 3}.get(schedule)
    there = own if sooner is None else own - recomputed
    spare, filling = backward, np.zeros_like(forward)
    if schedule == "zb_h1":
        found, there, filling = (
            before(inputs + np.maximum(forward - weights, 0.0) + 2 * hops) + lacking * mean(weights),
            own - weights,
            weights,
        )
    elif schedule == "zb_h2":
        there, filling = own - weights, weights
        others = (there + 2 * hops).sum(axis=0) - there
        found = np.maximum(before(forward + hops), others - mean(forward) * m / 2)
    else:
        found, spare = before(there + 2 * hops), there - forward if sooner is not None else backward
    if alive is not None:
        total = there + 2 * hops
        after = total.sum(axis=0) - np.cumsum(total, axis=0) + 2 * hops  # what is behind it, and the way there and back
        full = np.maximum(0.0, after - (alive - 1) * forward) + np.maximum(0.0, after - (alive - 1) * spare)
        back = np.where(m > alive, full, np.maximum(0.0, after - (np.minimum(m, alive) - 1) * filling))
        found = found + back + np.maximum(0, m - alive) * np.maximum(0.0, (there + after) / alive - own)
    return found if sooner is None else np.maximum(0.0, found - sooner * recomputed)


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
    """The least time of all micro-batches of a step, one per case (0-dim for scalars).

    Args:
        rank_seconds: per pipeline rank, forward and backward of one micro-batch over all its chunks; or arrays, for several
            cases at once.
        first_parts: per rank, the share of its first chunk, which the ranks after it wait for; None for equal chunks.
    """
    ranks = np.asarray(rank_seconds, dtype=np.float64)
    first = ranks if first_parts is None else ranks * num_chunks * np.asarray(first_parts)
    before = np.cumsum(first, axis=0) - first
    result: Floats = (num_micro_batch * ranks + bubble_share(schedule, num_chunks) * before).max(axis=0)
    return result
