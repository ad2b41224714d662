"""One replica with its stages cut: times and memory of its ranks, and from them the time of its passes.

pipeline    max over the ranks r of  m t_r + (warm-up and drain of the other ranks)  + the messages of one micro-batch;
            where messages are slow, or few micro-batches may be in flight,  m (t_1 + ... + t_p + messages) / in flight
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whale.estimate.costs.line import Floats
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.strategy import ReplicaSpec
from whale.schedules import BUILDERS
from whale.schedules.idle import RankPasses


@dataclass(frozen=True, slots=True)
class Lane:
    """A replica with its stages cut. "Lines" are (fixed, per row of a micro-batch).

    `hops`, ``[2, 2, ranks]``, are lines of seconds: of one way from each rank to the next in the mean of its chunks; and of the link where
    all devices send, over all chunks.
    """

    replica: ReplicaSpec
    pipeline: PipelineShape
    times: Floats  # F, B, W as lines, ``[3, 2, ranks]``
    hosts: Floats  # host time that starts F and B, ``[2, ranks]``
    recomputed: Floats  # per rank, 1 where the schedule itself recomputes F within B
    hops: Floats
    places: tuple[tuple[int, int, int], ...]  # (rank, first piece, end) of each stage
    held: Floats  # bytes per rank
    rooms: Floats  # bytes that each rank may hold
    stages: Floats  # F and B of each stage as lines, ``[stages, 2, 2]``
    read: frozenset[tuple[int, int]] | None  # stages of which the second reads the first; None where each reads the one before it

    def ranks(self, rows: Floats) -> tuple[Floats, Floats, Floats]:
        """F, B and W of each rank for a micro-batch of these rows: ``[ranks, rows]``."""
        forward, backward, weights = self.times[:, 0, :, None] + self.times[:, 1, :, None] * rows
        return np.maximum(forward, self.hosts[0][:, None]), np.maximum(backward, self.hosts[1][:, None]), weights

    def seconds(self, rows: Floats) -> Floats:
        """Seconds of all micro-batches of a step of so many rows."""
        pipeline = self.pipeline
        m = pipeline.num_micro_batch
        forward, backward, weights = self.ranks(rows / m)
        own = forward + backward
        if pipeline.num_ranks == 1:
            alone: Floats = m * own[0]
            return alone
        crowded = self.hops[1, 0, :, None] + self.hops[1, 1, :, None] * (rows / m)
        found: Floats = np.maximum((m * own + self._idle(rows, forward, backward, weights)).max(axis=0), m * crowded.max(axis=0))
        return found

    def _idle(self, rows: Floats, forward: Floats, backward: Floats, weights: Floats) -> Floats:
        """Seconds that each rank waits: ``[ranks, rows]``."""
        pipeline = self.pipeline
        m, v = pipeline.num_micro_batch, pipeline.num_chunks
        hops = self.hops[0, 0, :, None] + self.hops[0, 1, :, None] * (rows / m)
        alive = np.array(pipeline.in_flight[: pipeline.num_ranks], dtype=np.float64)[:, None]
        recomputed = self.recomputed[:, None] * forward
        idle = BUILDERS[pipeline.schedule].idle(RankPasses(forward, backward, weights, m, v, recomputed, hops, alive))
        return idle if self.read is None else np.maximum(0.0, idle - self._saved(rows / m, self.read))

    def _saved(self, rows: Floats, read: frozenset[tuple[int, int]]) -> Floats:
        """By how much sooner one micro-batch of these rows is through than if its stages ran in turn: branches run beside others."""
        ranks, saved = self.pipeline.stage_rank, np.zeros_like(rows)
        for kind, pairs in ((0, read), (1, {(after, before) for before, after in read})):
            ends, free = dict[int, Floats](), dict[int, Floats]()
            order = range(len(ranks)) if kind == 0 else reversed(range(len(ranks)))
            for stage in order:
                lasts = self.stages[stage, kind, 0] + self.stages[stage, kind, 1] * rows
                waits = [ends[before] for before, after in pairs if after == stage]
                ends[stage] = free[ranks[stage]] = np.maximum.reduce([free.get(ranks[stage], np.zeros_like(rows)), *waits]) + lasts
                saved = saved + lasts
            saved = saved - np.maximum.reduce(list(ends.values()))
        return saved

    def ends(self, rows: float) -> tuple[float, Floats]:
        """Seconds of all micro-batches of a step, and when each rank ends its last backward pass or weight gradients."""
        pipeline = self.pipeline
        m, passes = pipeline.num_micro_batch, float(self.seconds(np.array([rows]))[0])
        forward, backward, weights = self.ranks(np.array([rows / m]))
        own = m * (forward + backward)[:, 0]
        if pipeline.num_ranks == 1:
            return passes, own
        if BUILDERS[pipeline.schedule].delays_weights:
            idle = self._idle(np.array([rows]), forward, backward, weights)[:, 0]
            return passes, np.minimum(passes, own + idle)
        before = (np.cumsum(backward[:, 0]) - backward[:, 0]) / pipeline.num_chunks
        return passes, np.maximum(passes - before, own)
