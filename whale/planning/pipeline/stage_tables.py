"""What every piece of a model would cost as each stage of a pipeline: the tables among which the cut is sought.

Seconds depend on the kind of the device and on the link over which the piece receives, bytes on the stage's micro-batches in flight
and the memory of the device: replicas with the same rows share both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device, Link
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.pipeline.recompute import Policy, expected_bytes
from whale.planning.pipeline.scheduling import PipelineShape


@dataclass(eq=False)
class StageTables:
    """Makes the tables; those of one number of rows are kept until another is asked for.

    Args:
        points: where the model may be cut.
        prices: of its graph on the cluster.
        pipeline: whose stages the pieces would be.
        policy: what recomputes inside stages.
    """

    points: CutPoints
    prices: Prices
    pipeline: PipelineShape
    policy: Policy
    _asked: int = field(default=0, init=False)
    _seconds: dict[tuple[Device, Link | None, float, int], Floats] = field(default_factory=dict, init=False)
    _bytes: dict[int, Floats] = field(default_factory=dict, init=False)
    _excess: dict[tuple[int, float], Floats] = field(default_factory=dict, init=False)

    def of(self, stage: int, devices: Sequence[str], num_rows: int, margin: float) -> tuple[Floats, Floats]:
        """Seconds of every piece as this stage, and the bytes by which it overflows its share of the device's memory.

        Args:
            stage: of the pipeline.
            devices: per rank its first device.
            num_rows: of a micro-batch.
            margin: share of the device's memory that may be planned for.
        """
        if self._asked != num_rows:
            self._asked = num_rows
            for known in (self._seconds, self._bytes, self._excess):
                known.clear()
        ranks = self.pipeline.stage_rank
        name, before = devices[ranks[stage]], devices[ranks[max(stage - 1, 0)]]
        link = self.prices.link(before, name) if before != name else None
        times = 2.0 if self.pipeline.recomputed[stage] else 1 + self.policy.share(stage)
        kind = self.prices.cluster.by_name[name].kind
        timed = kind, link, times, self.pipeline.width(stage)
        if timed not in self._seconds:
            self._seconds[timed] = self._price(*timed, num_rows)
        held = stage, margin * self.prices.capacity(name)
        if held not in self._excess:
            if stage not in self._bytes:
                self._bytes[stage] = self._held(stage, num_rows)
            self._excess[held] = np.maximum(self._bytes[stage] - held[1] / self.pipeline.num_chunks, 0.0)
        return self._seconds[timed], self._excess[held]

    def _price(self, device: Device, link: Link | None, times: float, width: int, num_rows: int) -> Floats:
        """Seconds of every piece on one of the devices of a split group, which have equal parts of the work until it is cut."""
        points, prices = self.points, self.prices
        seconds = prices.seconds(device, float(num_rows))
        index = prices.positions(points.spine)
        forward = seconds.forward_fixed + num_rows * seconds.forward_per_row
        per_op = (times * forward + seconds.backward_fixed + num_rows * seconds.backward_per_row) / width
        started = times * seconds.forward_host + seconds.backward_host  # every device starts every kernel
        time = np.maximum(self._between_bounds(per_op[index]), self._between_bounds(started[index]))
        if link is not None:
            time = time + (points.messages * link.latency + self._crossing(num_rows) / link.bandwidth)[:, None]
        return self._of_pieces(time)

    def _between_bounds(self, per_op: Floats) -> Floats:
        """The sums over the ops of every piece."""
        done = np.concatenate(([0.0], np.cumsum(per_op)))[self.points.bounds]
        found: Floats = done[None, :] - done[:, None]
        return found

    def _held(self, stage: int, num_rows: int) -> Floats:
        """Bytes that every piece needs on a device."""
        points, pipeline, crossing = self.points, self.pipeline, self._crossing(num_rows)
        kept = points.kept_fixed + points.kept_per_row * num_rows
        received = crossing / 2 if stage else np.zeros_like(crossing)
        inside, entering = kept[None, :] - kept[:, None], float(np.quantile(crossing, 0.25)) / 2
        memory = points.parameters + expected_bytes(pipeline, self.policy, stage, received[:, None], inside, entering)
        return self._of_pieces(memory / pipeline.width(stage))

    def _crossing(self, num_rows: int) -> Floats:
        """Per bound, the bytes that travel there both ways."""
        crossing: Floats = self.points.crossing_fixed + self.points.crossing_per_row * num_rows
        return crossing

    def _of_pieces(self, table: Floats) -> Floats:
        """The table with infinity where an end is not behind its start."""
        table[self._no_pieces] = np.inf
        return table

    @cached_property
    def _no_pieces(self) -> NDArray[np.bool_]:
        places: NDArray[np.bool_] = np.tril(np.ones((len(self.points.bounds),) * 2, dtype=bool))
        return places
