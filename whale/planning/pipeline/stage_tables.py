"""What every piece of a model would cost as each stage of a pipeline: the tables among which the cut is sought.

Seconds depend on the kind of the device and on the way on which the piece receives, bytes on the stage's micro-batches in flight
and the memory of the device: replicas with the same rows share both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.estimate import Line, all_gather_line
from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device, Link
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.pipeline.placement import Placed
from whale.planning.pipeline.recompute import Policy, expected_bytes
from whale.planning.pipeline.scheduling import PipelineShape


@dataclass(frozen=True, eq=False)
class Band:
    """The pieces of a model that are not too long, as they lie in a table.

          start    j-3  j-2  j-1
    end 1           -    -    0        what begins before the model is no piece
    end 2           -    0    1
    end 3           0    1    2

    Attributes:
        num_units: that the model can be cut into.
        longest: units of a piece at most.
    """

    num_units: int
    longest: int

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Per row, the place where its pieces end: ``[ends, 1]``."""
        return np.arange(self.num_units + 1, dtype=np.int64)[:, None]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each piece starts, the longest first: ``[ends, pieces]``; 0 for what is none."""
        return np.maximum(self._starts, 0)

    @cached_property
    def is_piece(self) -> NDArray[np.bool_]:
        """Which entries are pieces."""
        return self._starts >= 0

    @cached_property
    def is_limit(self) -> NDArray[np.bool_]:
        """Which pieces are as long as may be, and could be longer."""
        found = np.zeros_like(self.is_piece)
        found[:-1, 0] = self.is_piece[:-1, 0]
        return found

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.ends - np.arange(self.longest, 0, -1, dtype=np.int64)
        return found


@dataclass(frozen=True, slots=True)
class Way:
    """How what crosses a cut gets to a device.

    Between split groups every device sends a part of it, which is gathered on arrival, where that is faster: the scattering pass decides
    it of each tensor, once there are stages.

    Attributes:
        link: between the devices.
        num_parts: that may cross by themselves.
        gathering: seconds of a message, by its bytes, inside the groups.
    """

    link: Link
    num_parts: int = 1
    gathering: Line = field(default_factory=Line)

    def seconds(self, messages: Floats, num_bytes: Floats) -> Floats:
        """Seconds of so many messages of so many bytes together."""
        whole = messages * self.link.latency + num_bytes / self.link.bandwidth
        if self.num_parts == 1:
            return whole
        latency, per_byte = self.link.latency + self.gathering.fixed, 1 / self.link.bandwidth / self.num_parts + self.gathering.per_row
        return np.minimum(whole, messages * latency + num_bytes * per_byte)


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
    _sums: dict[tuple[Device, float, int], tuple[Floats, Floats]] = field(default_factory=dict, init=False)
    _seconds: dict[tuple[tuple[Device, float, int], Way | None, int], Floats] = field(default_factory=dict, init=False)
    _bytes: dict[tuple[tuple[int, int, float, int, bool], int], Floats] = field(default_factory=dict, init=False)
    _gatherings: dict[tuple[str, ...], Line] = field(default_factory=dict, init=False)

    def of(self, stage: int, placed: Placed, num_rows: int, margin: float, band: Band) -> tuple[Floats, Floats]:
        """Seconds of every piece of a band as this stage, and the bytes by which it overflows its share of the device's memory.

        Neither falls where a piece ends later. Both are infinite for what is no piece.

        Args:
            stage: of the pipeline.
            placed: the devices of each rank.
            num_rows: of a micro-batch.
            margin: share of the device's memory that may be planned for.
        """
        self._ask(num_rows)
        kind, way = self._where(stage, placed, num_rows)
        timed = self._timed(stage, kind), way, band.longest
        if timed not in self._seconds:
            self._seconds[timed] = np.where(band.is_piece, self.seconds(stage, placed, num_rows, band.starts, band.ends), np.inf)
        look = self._look(stage), band.longest
        if look not in self._bytes:
            self._bytes[look] = np.where(band.is_piece, self._held(stage, num_rows, band), np.inf)
        room = margin * self.prices.capacity(placed[self.pipeline.stage_rank[stage]][0]) / self.pipeline.num_chunks
        return self._seconds[timed], np.maximum(self._bytes[look] - room, 0.0)

    def seconds(self, stage: int, placed: Placed, num_rows: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Floats:
        """Seconds of pieces as this stage, on one of the devices of a split group, which have equal parts of the work until it is cut.

        With what it receives from the stage before; `answered` is what it receives from the next.
        """
        self._ask(num_rows)
        kind, way = self._where(stage, placed, num_rows)
        timed = self._timed(stage, kind)
        if timed not in self._sums:
            self._sums[timed] = self._sums_of(*timed, num_rows)
        computing, starting = (sums[ends] - sums[starts] for sums in self._sums[timed])
        found: Floats = np.maximum(computing, starting)
        if way is not None:
            found = found + self._received(way, num_rows)[starts]
        return found

    def answered(self, stage: int, placed: Placed, num_rows: int) -> Floats:
        """Per place where a piece may end as this stage, the seconds in which it receives gradients from the next."""
        way = self._where(stage + 1, placed, num_rows)[1] if self.prices.training and stage + 1 < self.pipeline.num_stages else None
        return np.zeros(self.points.num_units + 1) if way is None else self._received(way, num_rows)

    def _received(self, way: Way, num_rows: int) -> Floats:
        """Per place, the seconds of what crosses there one way: of training, half of it."""
        share = 0.5 if self.prices.training else 1.0
        return way.seconds(share * self.points.messages, share * self._crossing(num_rows))

    def _ask(self, num_rows: int) -> None:
        """What is known of other numbers of rows is let go."""
        if self._asked != num_rows:
            self._asked = num_rows
            for known in (self._sums, self._seconds, self._bytes, self._gatherings):
                known.clear()

    def _where(self, stage: int, placed: Placed, num_rows: int) -> tuple[Device, Way | None]:
        """The kind of the device of a stage, and the way on which it receives."""
        ranks, before = self.pipeline.stage_rank, max(stage - 1, 0)
        name, source = placed[ranks[stage]][0], placed[ranks[before]][0]
        kind = self.prices.cluster.by_name[name].kind
        if source == name:
            return kind, None
        link, num_parts = self.prices.link(source, name), min(self.pipeline.width(before), self.pipeline.width(stage))
        if num_parts == 1:
            return kind, Way(link)
        here, there = (self._gathering(placed[ranks[own]][: self.pipeline.width(own)], num_rows) for own in (stage, before))
        return kind, Way(link, num_parts, (here + there) * 0.5)  # values are gathered here, their gradients there

    def _gathering(self, group: tuple[str, ...], num_rows: int) -> Line:
        """Seconds of gathering a message in a split group, by its bytes."""
        if group not in self._gatherings:
            about = float(np.median(self._crossing(num_rows)))
            self._gatherings[group] = all_gather_line(self.prices.cluster, group, Line(0.0, 1.0), 1, about)
        return self._gatherings[group]

    def _timed(self, stage: int, kind: Device) -> tuple[Device, float, int]:
        """What the time of ops as this stage depends on: how often they run forward, and on how many devices, with the kind."""
        return kind, 2.0 if self.pipeline.recomputed[stage] else 1 + self.policy.share(stage), self.pipeline.width(stage)

    def _look(self, stage: int) -> tuple[int, int, float, int, bool]:
        """What the bytes of a piece depend on."""
        pipeline = self.pipeline
        return pipeline.in_flight[stage], pipeline.recomputed[stage], self.policy.share(stage), pipeline.width(stage), stage > 0

    def _sums_of(self, device: Device, times: float, width: int, num_rows: int) -> tuple[Floats, Floats]:
        """Per place to cut, seconds of all ops before it: of a device, and of the host that starts them."""
        seconds, index = self.prices.seconds(device, float(num_rows)), self._index
        forward = seconds.forward_fixed + num_rows * seconds.forward_per_row
        per_op = (times * forward + seconds.backward_fixed + num_rows * seconds.backward_per_row) / width
        started = times * seconds.forward_host + seconds.backward_host  # every device starts every kernel
        computing, starting = (np.concatenate(([0.0], np.cumsum(own[index])))[self.points.bounds] for own in (per_op, started))
        return computing, starting

    @cached_property
    def _index(self) -> NDArray[np.int64]:
        return self.prices.positions(self.points.spine)

    def _held(self, stage: int, num_rows: int, band: Band) -> Floats:
        """Bytes that every piece needs on a device."""
        points, pipeline, crossing = self.points, self.pipeline, self._crossing(num_rows)
        kept = points.kept_fixed + points.kept_per_row * num_rows
        received = crossing / 2 if stage else np.zeros_like(crossing)
        inside, entering = kept[band.ends] - kept[band.starts], float(np.quantile(crossing, 0.25)) / 2
        expected = expected_bytes(pipeline, self.policy, stage, received[band.starts], inside, entering)
        found: Floats = (points.parameters[band.starts, band.ends] + expected) / pipeline.width(stage)
        return found

    def _crossing(self, num_rows: int) -> Floats:
        """Per bound, the bytes that travel there both ways."""
        crossing: Floats = self.points.crossing_fixed + self.points.crossing_per_row * num_rows
        return crossing
