"""Closed forms of the idle time of orders, one per order: seconds of a step that each rank waits, by which the search ranks.

A rank starts after the first forward pass of the ranks before it, and after its last backward pass they still have theirs.
Before its first backward pass and after its last forward pass it waits until what it sent returns, less what it does
meanwhile; and with few micro-batches in flight, in each turn. For 1F1B, with t = F + B:

    t_1 + ... + t_k-1  +  (after - (alive - 1) F)+  +  (after - (alive - 1) B)+  +  (m - alive) ((t + after) / alive - t)+

where `after` is the time on the ranks behind it, with the messages. With equal ranks and no messages this is exact for most
orders: (p - 1) (F + B) / v.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEFT_OVER = 0.9  # cost of an incomplete last group of interleaving, in missing micro-batches per rank


@dataclass(frozen=True)
class RankPasses:
    """The passes of one micro-batch on each rank, in seconds over all its chunks: ``[ranks, cases]``."""

    forward: Floats
    backward: Floats
    weights: Floats  # the part of `backward` that is weight gradients
    num_micro_batch: Floats | int  # of a step; one for all cases, or of each
    num_chunks: int = 1
    recomputed: Floats | float = 0.0  # the part of `backward` that the order itself recomputes
    hops: Floats | float = 0.0  # of a message from each rank to the next
    alive: Floats | None = None  # per rank, the most micro-batches in flight, ``[ranks, 1]``; None ignores that limit
    num_ranks: int | None = None  # where several ranks are added up in one row
    first: Floats | float | None = None  # per rank, the share of its first chunk; None for equal chunks

    @property
    def own(self) -> Floats:
        """Of a rank, without waiting."""
        return self.forward + self.backward

    @property
    def inputs(self) -> Floats:
        """Backward without weight gradients."""
        return self.backward - self.weights

    @property
    def lacking(self) -> Floats:
        """Micro-batches that lack to fill the pipeline with."""
        return np.maximum(0, self.p - self.num_micro_batch)

    @property
    def way(self) -> Floats:
        """Messages from each rank to the next, and as many rows as ranks."""
        return np.zeros_like(self.forward) + self.hops

    @property
    def of_first_chunk(self) -> Floats:
        """Of the first chunk of each rank."""
        return self.own / self.num_chunks if self.first is None else self.own * self.first

    @property
    def p(self) -> int:
        """The number of ranks."""
        return len(self.forward) if self.num_ranks is None else self.num_ranks

    def mean(self, seconds: Floats) -> Floats:
        """Of all ranks."""
        total: Floats = seconds.sum(axis=0)
        return total / self.p

    def returning(self, there: Floats, spare: Floats, filling: Floats) -> Floats:
        """Seconds that a rank waits for what it sent to return.

        Args:
            there: of one micro-batch on each rank on the way there and back.
            spare: what a rank does meanwhile after its last forward pass.
            filling: what it has to do besides while few micro-batches are in flight.
        """
        if self.alive is None:
            return np.zeros_like(self.forward)
        m, alive, hops = self.num_micro_batch, self.alive, self.way
        total = there + 2 * hops
        after = total.sum(axis=0) - np.cumsum(total, axis=0) + 2 * hops  # what is behind it, and the way there and back
        full = np.maximum(0.0, after - (alive - 1) * self.forward) + np.maximum(0.0, after - (alive - 1) * spare)
        found: Floats = np.where(m > alive, full, np.maximum(0.0, after - (np.minimum(m, alive) - 1) * filling))
        found += np.maximum(0, m - alive) * np.maximum(0.0, (there + after) / alive - self.own)
        return found


def before(seconds: Floats) -> Floats:
    """The sum over the ranks before each."""
    found: Floats = np.cumsum(seconds, axis=0) - seconds
    return found


def in_turn(passes: RankPasses, sooner: int | None = None) -> Floats:
    """1F1B; `sooner`: where the order recomputes before gradients arrive, how many recomputations that saves; None: it does not."""
    there = passes.own if sooner is None else passes.own - passes.recomputed
    spare = passes.backward if sooner is None else there - passes.forward
    found = before(there + 2 * passes.way) + passes.returning(there, spare, np.zeros_like(there))
    return found if sooner is None else np.maximum(0.0, found - sooner * passes.recomputed)


def by_chunks(passes: RankPasses) -> Floats:
    """All micro-batches pass one chunk before the next, which waits until the first of them is round all ranks."""
    m, p, v, ring = passes.num_micro_batch, passes.p, passes.num_chunks, passes.way.sum(axis=0)
    waits = [np.maximum(0.0, (p - m) * passes.mean(own) / v + ring) for own in (passes.forward, passes.backward)]
    found: Floats = before(passes.of_first_chunk) + 2 * ring + (v - 1) * (waits[0] + waits[1])
    return found


def by_groups(passes: RankPasses) -> Floats:
    """The same in groups of micro-batches, forward and backward in turn."""
    m, p, v = passes.num_micro_batch, passes.p, passes.num_chunks
    lacking = np.where((passes.lacking == 0) & (np.asarray(m) % p > 0), LEFT_OVER * p, passes.lacking)
    found: Floats = before(passes.of_first_chunk) + lacking * (1 - 1 / v) * passes.mean(passes.own) + 2 * v * passes.way.sum(axis=0)
    return found


def with_late_weights(passes: RankPasses) -> Floats:
    """Weight gradients fill what is left of the drain (ZB-H1)."""
    found = before(passes.inputs + np.maximum(passes.forward - passes.weights, 0.0) + 2 * passes.way)
    returning = passes.returning(passes.own - passes.weights, passes.backward, passes.weights)
    return found + np.maximum(returning, passes.lacking * passes.mean(passes.weights))


def with_late_weights_twice_ahead(passes: RankPasses) -> Floats:
    """The same with twice the forwards ahead (ZB-H2)."""
    there = passes.own - passes.weights
    others = (there + 2 * passes.way).sum(axis=0) - there
    found = before(passes.forward + passes.way) + passes.returning(there, passes.backward, passes.weights)
    round_trip: Floats = others - passes.mean(passes.forward) * passes.num_micro_batch / 2
    return np.maximum(found, round_trip)


def down_and_up(passes: RankPasses) -> Floats:
    """Two chunks per rank in the shape of a V (ZB-V)."""
    missing = passes.lacking - np.maximum(0, passes.num_micro_batch - passes.p) / 2
    slack = before(passes.inputs + np.maximum(passes.forward - passes.weights, 0.0)) + missing * passes.mean(passes.weights)
    found: Floats = np.maximum(before(np.maximum(passes.forward, passes.inputs)) / 2, slack) + 4 * passes.way.sum(axis=0)
    return found
