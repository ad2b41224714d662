"""Cost tables of all pieces of a model as each stage of a pipeline, over which the cut is optimised.

Seconds depend on the device type and on the link that the piece receives over, bytes on the stage's micro-batches in
flight and the device's memory: replicas with the same rows share both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from whale.estimate import Line, all_gather_line
from whale.estimate.costs.line import Floats
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device, Link
from whale.planning.cutting.pieces import Pieces
from whale.planning.pipeline.cut_points import CutPoints, Span, of_piece
from whale.planning.pipeline.recompute import Policy, expected_bytes, going_back
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.strategy import Placed

Places = NDArray[np.int64] | int
"""Cut points: of many pieces, or of one."""

_Spans = Sequence[tuple[Span, float]]

_Timed = tuple[Device, float, int, str | None]


@dataclass(frozen=True, eq=False)
class Band:
    """The pieces of a model up to a length, as laid out in a table.

          start    j-3  j-2  j-1
    end 1           -    -    0        a start before the model is no piece
    end 2           -    0    1
    end 3           0    1    2
    """

    num_units: int
    longest: int

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Per row, the end of its pieces: ``[ends, 1]``."""
        return np.arange(self.num_units + 1, dtype=np.int64)[:, None]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The start of each piece, the longest first: ``[ends, pieces]``; 0 where there is none."""
        return np.maximum(self._starts, 0)

    @cached_property
    def is_piece(self) -> NDArray[np.bool_]:
        return self._starts >= 0

    def before(self) -> Floats:
        """The initial values of the recursion: 0 at the first place; `padded`."""
        found = np.full(self.longest + self.num_units + 1, np.inf)
        found[self.longest] = 0.0
        return found

    def padded(self, values: Floats) -> Floats:
        """Values of all places, with infinity before the model."""
        return np.concatenate((np.full(self.longest, np.inf), values))

    def windows(self, padded: Floats) -> Floats:
        """Padded values at the start of each piece, as a table."""
        found: Floats = np.lib.stride_tricks.sliding_window_view(padded, self.longest)[: self.num_units + 1]
        return found

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.ends - np.arange(self.longest, 0, -1, dtype=np.int64)
        return found


@dataclass(frozen=True, slots=True)
class CutLink:
    """How values that cross a cut reach a device.

    Between split groups every device may send a part, which is gathered on arrival, if that is faster; the scattering pass
    decides it per tensor later.
    """

    link: Link  # between the devices
    num_parts: int = 1  # that can be sent separately
    gathering: Line = field(default_factory=Line)  # seconds of a message inside the groups, by bytes

    def seconds(self, messages: Floats, num_bytes: Floats) -> Floats:
        """Seconds of so many messages with so many bytes in total."""
        whole = messages * self.link.latency + num_bytes / self.link.bandwidth
        if self.num_parts == 1:
            return whole
        latency, per_byte = self.link.latency + self.gathering.fixed, 1 / self.link.bandwidth / self.num_parts + self.gathering.per_row
        return np.minimum(whole, messages * latency + num_bytes * per_byte)


@dataclass(eq=False)
class StageTables:
    """The tables of a model's pieces as stages of `pipeline`; cached for one number of rows at a time."""

    points: CutPoints
    pieces: Pieces
    prices: Prices
    pipeline: PipelineShape
    policy: Policy
    budget: Budget = ALL
    _asked: int = field(default=0, init=False)
    _enters: float | None = field(default=None, init=False)
    _sums: dict[_Timed, tuple[Floats, Floats]] = field(default_factory=dict, init=False)
    _bytes: dict[Hashable, Floats] = field(default_factory=dict, init=False)
    _gatherings: dict[tuple[str, ...], Line] = field(default_factory=dict, init=False)
    _ways: dict[tuple[Placed, int, int], CutLink | None] = field(default_factory=dict, init=False)

    @property
    def look(self) -> Hashable:
        """Equal for pipelines in which equal devices take equally long for equal pieces."""
        stages = range(self.pipeline.num_stages)
        times = tuple(2.0 if self.pipeline.recomputed[stage] else 1 + self.policy.share(stage) for stage in stages)
        return self.pipeline.stage_rank, self.pipeline.devices, times

    def times(self, stage: int, placed: Placed, num_rows: int, band: Band) -> Floats:
        """Seconds of every piece of a band as this stage, infinite where there is none; never decreasing with the end.

        With values from the stage before, as if it sent all of them; `answers` has the gradients from the next.
        """
        way = self._way(stage - 1, stage, placed, num_rows)
        timed, known = (*self._timed(stage, self._kind(stage, placed), placed), way, band.longest, num_rows), self.pieces.times
        if timed not in known:
            computing = self.computing(stage, placed, num_rows, band.starts, band.ends)
            known[timed] = np.where(band.is_piece, computing + self._in_band(self.points.received, "received", way, num_rows, band), np.inf)
        return known[timed]

    def answers(self, stage: int, placed: Placed, num_rows: int, band: Band) -> Floats:
        """Seconds of every piece of a band to receive gradients from the next stage, as if it sent all of them."""
        way = self._way(stage, stage + 1, placed, num_rows) if self.prices.training else None
        return self._in_band(self.points.returned, "returned", way, num_rows, band)

    def _in_band(self, crossing: Floats, name: str, way: CutLink | None, num_rows: int, band: Band) -> Floats:
        """`_over` of every piece of a band; `name` of what crosses."""
        key, known = (name, way, band.longest, num_rows), self.pieces.times
        if key not in known:
            known[key] = self._over(way, crossing[:, band.starts, band.ends], num_rows)
        return known[key]

    def skipping(self, stage: int, placed: Placed, num_rows: int, bounds: Sequence[int]) -> tuple[_Spans, _Spans]:
        """Seconds that `times` and `answers` lack, or have too much, if the other stages are as in this cut: of the pieces in each span.

        A tensor that is read further on than by the next stage is sent by the rank that makes it to each stage that reads it on another.
        """
        values, gradients = list[tuple[Span, float]](), list[tuple[Span, float]]()
        for far, made, read in self.points.skips(bounds):
            sent = partial(self._sent, np.array(far.payload), placed, num_rows)
            if made < stage - 1:
                more = sent(made, stage) - sent(stage - 1, stage)
                values += [(span, more) for span in far.arrives]
            if self.prices.training and read[-1] > stage + 1:
                last = {max(reader, stage + 1): unit for reader, unit in zip(read, far.read, strict=True)}
                gradients += [(far.returns(unit), sent(stage, reader)) for reader, unit in last.items()]
                gradients.append((far.returns(far.read[-1]), -sent(stage, stage + 1)))
        return values, gradients

    def by_stage(self, placed: Placed, num_rows: int, bounds: Sequence[int]) -> list[float]:
        """Seconds of each stage of a cut for a micro-batch, on one device of a split group, with all that it receives."""
        skips = self.points.are_skipped(bounds)
        ways = [self._way(stage - 1, stage, placed, num_rows) for stage in range(len(bounds))]
        crossing = (self.points.received, self.points.returned) if self.prices.training else (self.points.received,)
        found = list[float]()
        for stage, (start, end) in enumerate(pairwise(bounds)):
            seconds = float(self.computing(stage, placed, num_rows, start, end))
            for way, each in zip(ways[stage : stage + 2], crossing, strict=False):
                seconds += 0.0 if way is None else float(self._over(way, each[:, start, end], num_rows))
            for spans in self.skipping(stage, placed, num_rows, bounds) if skips else ():
                seconds += of_piece(self.points.num_units, start, end, spans)
            found.append(seconds)
        return found

    def lowest(self, placed: Placed, num_rows: int, margin: float) -> NDArray[np.int64]:
        """Per stage and end of a piece, the first start that fits in memory: ``[stages, places]``."""
        stages, num_units = self.pipeline.num_stages, self.points.num_units
        ends, rooms = np.arange(num_units + 1), margin * self.rooms(placed)
        low, high = np.zeros((stages, num_units + 1), dtype=np.int64), np.broadcast_to(ends, (stages, num_units + 1)).copy()
        for (kind, width), own in self._alike(placed).items():
            first, last = low[own], high[own]
            while np.any(first < last):
                middle = (first + last) // 2
                fits = self.held(own[:, None], kind, width, num_rows, middle, ends) <= rooms[own, None]
                first, last = np.where(fits, first, middle + 1), np.where(fits, middle, last)
                first = np.minimum(first, last)
            low[own] = last
        return low

    def excess(self, stage: int, placed: Placed, num_rows: int, margin: float, band: Band) -> Floats:
        """Bytes by which pieces overflow `margin` of the device's memory."""
        self._ask(num_rows)
        name = placed[self.pipeline.stage_rank[stage]][0]
        kind = self.prices.kinds[name] if self.pipeline.width(stage) > 1 else None
        look = *self._look(stage), kind, band.longest
        if look not in self._bytes:
            held = self.held(stage, kind, self.pipeline.width(stage), num_rows, band.starts, band.ends)
            self._bytes[look] = np.where(band.is_piece, held, np.inf)
        room = margin * self.prices.capacity(name, self.budget) / self.pipeline.num_chunks
        return np.maximum(self._bytes[look] - room, 0.0)

    def computing(self, stage: int, placed: Placed, num_rows: int, starts: Places, ends: Places) -> Floats:
        """Seconds of pieces as this stage, on one device of a split group (with an even part of the work), without messages."""
        self._ask(num_rows)
        timed = self._timed(stage, self._kind(stage, placed), placed)
        if timed not in self._sums:
            self._sums[timed] = self._sums_of(*timed, num_rows)
        computing, starting = (sums[ends] - sums[starts] for sums in self._sums[timed])
        found: Floats = np.maximum(computing, starting)
        return found

    def running(self, stage: int, kind: Device, placed: Placed, num_rows: int, places: NDArray[np.int64]) -> list[float]:
        """Seconds of all that is before each place, as this stage: of the device, or of its host where that takes longer."""
        timed = self._timed(stage, kind, placed)
        key = *timed, num_rows, len(places)
        if key not in self.pieces.lists:
            self._ask(num_rows)
            computing, starting = self._sums_of(*timed, num_rows)
            self.pieces.lists[key] = np.maximum(computing, starting)[places].tolist()
        return self.pieces.lists[key]

    def loads(self, placed: Placed, num_rows: int, bounds: Sequence[int]) -> Floats:
        """Bytes per stage on a device, for a given cut."""
        places, found = np.array(bounds), np.zeros(self.pipeline.num_stages)
        for (kind, width), own in self._alike(placed).items():
            found[own] = self.held(own, kind, width, num_rows, places[own], places[own + 1])
        return found

    def fit(self, placed: Placed, num_rows: int, bounds: Sequence[int], margin: float = 1.0) -> bool:
        """Whether the stages of each rank fit together into this share of its memory, for a given cut."""
        loads, rooms = self.on_ranks(placed, num_rows, bounds)
        return bool(np.all(loads <= margin * rooms))

    def on_ranks(self, placed: Placed, num_rows: int, bounds: Sequence[int]) -> tuple[Floats, Floats]:
        """Per rank, bytes of all its stages on a device, for a given cut, and those that it may hold."""
        ranks = self.pipeline.stage_rank
        loads, rooms = (np.bincount(ranks, own).astype(np.float64) for own in (self.loads(placed, num_rows, bounds), self.rooms(placed)))
        for rank in range(self.pipeline.num_ranks) if self.points.read_again else ():
            for first, second in combinations(self.pipeline.stages_of(rank), 2):
                if self.pipeline.width(first) == 1:
                    loads[rank] -= self.points.read_twice((bounds[first], bounds[first + 1]), (bounds[second], bounds[second + 1]))
        return loads, rooms

    def _alike(self, placed: Placed) -> dict[tuple[Device | None, int], NDArray[np.int64]]:
        """The stages by device type and width of their split groups; for unsplit stages the type does not matter."""
        groups: dict[tuple[Device | None, int], list[int]] = {}
        for stage, rank in enumerate(self.pipeline.stage_rank):
            width = self.pipeline.width(stage)
            groups.setdefault((self.prices.kinds[placed[rank][0]] if width > 1 else None, width), []).append(stage)
        return {key: np.array(stages) for key, stages in groups.items()}

    def rooms(self, placed: Placed) -> Floats:
        """Bytes that each stage may hold on its devices: an equal part for each stage of a rank."""
        capacity = np.array([self.prices.capacity(names[0], self.budget) for names in placed], dtype=np.float64)
        found: Floats = capacity[list(self.pipeline.stage_rank)] / self.pipeline.num_chunks
        return found

    def _sent(self, crossing: Floats, placed: Placed, num_rows: int, first: int, second: int) -> float:
        """Seconds in which of two stages one receives from the other what crosses."""
        return float(self._over(self._way(first, second, placed, num_rows), crossing, num_rows))

    def _over(self, way: CutLink | None, crossing: Floats, num_rows: int) -> Floats:
        """Seconds of what crosses one way: of training, half of it.

        `crossing`: fixed bytes, those per row, and messages, both ways: ``[3, ...]``.
        """
        if way is None:
            return np.zeros(crossing.shape[1:])
        fixed, per_row, messages = crossing
        share = 0.5 if self.prices.training else 1.0
        return way.seconds(share * messages, share * (fixed + per_row * num_rows))

    def _ask(self, num_rows: int) -> None:
        """Clears what is cached of other numbers of rows."""
        if self._asked != num_rows:
            self._asked, self._enters = num_rows, None
            for known in (self._sums, self._bytes, self._gatherings, self._ways):
                known.clear()

    def _kind(self, stage: int, placed: Placed) -> Device:
        """The device type of a stage."""
        return self.prices.cluster.by_name[placed[self.pipeline.stage_rank[stage]][0]].kind

    def _way(self, first: int, second: int, placed: Placed, num_rows: int) -> CutLink | None:
        """How two stages reach each other; None where they share devices, or there is no such stage."""
        self._ask(num_rows)
        key = placed, first, second
        if key not in self._ways:
            is_there = first >= 0 and second < self.pipeline.num_stages
            self._ways[key] = self._between((first, second), placed, num_rows) if is_there else None
        return self._ways[key]

    def _between(self, stages: tuple[int, int], placed: Placed, num_rows: int) -> CutLink | None:
        ranks = self.pipeline.stage_rank
        source, name = (placed[ranks[stage]][0] for stage in stages)
        if source == name:
            return None
        link, num_parts = self.prices.link(source, name), min(map(self.pipeline.width, stages))
        if num_parts == 1:
            return CutLink(link)
        there, here = (self._gathering(placed[ranks[stage]][: self.pipeline.width(stage)], num_rows) for stage in stages)
        return CutLink(link, num_parts, (here + there) * 0.5)  # values are gathered here, their gradients there

    def _gathering(self, group: tuple[str, ...], num_rows: int) -> Line:
        """Seconds of gathering a message in a split group, by its bytes."""
        if group not in self._gatherings:
            about = float(np.median(self._crossing(num_rows)))
            self._gatherings[group] = all_gather_line(self.prices.cluster, group, Line(0.0, 1.0), 1, about)
        return self._gatherings[group]

    def _timed(self, stage: int, kind: Device, placed: Placed) -> _Timed:
        """What the time of ops as this stage depends on: number of forward passes, devices, and host."""
        width, times = self.pipeline.width(stage), 2.0 if self.pipeline.recomputed[stage] else 1 + self.policy.share(stage)
        host = self.prices.cluster.by_name[placed[self.pipeline.stage_rank[stage]][0]].host if width > 1 else None
        return kind, times, width, host

    def _look(self, stage: int) -> tuple[Hashable, ...]:
        """What the bytes of a piece depend on."""
        pipeline = self.pipeline
        return pipeline.in_flight[stage], pipeline.recomputed[stage], self.policy.share(stage), pipeline.width(stage), stage > 0

    def _sums_of(self, device: Device, times: float, width: int, host: str | None, num_rows: int) -> tuple[Floats, Floats]:
        """Per place, seconds of all ops before it: of a device, and of its host."""
        parts = width if self.pieces.can_split(device, width, host) else 1
        sums, share = self.pieces.sums(device, parts, float(num_rows), host), parts / width
        computing = times * (sums.forward[0] + num_rows * sums.forward[1]) + sums.backward[0] + num_rows * sums.backward[1]
        return computing * share, times * sums.started_forward + sums.started_backward

    def held(
        self,
        stage: int | NDArray[np.int64],
        kind: Device | None,
        width: int,
        num_rows: int,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> Floats:
        """Bytes of pieces on a device as one stage, or each as its own; `kind` matters for split groups only."""
        self._ask(num_rows)
        crossing = self._crossing(num_rows)
        received = np.where(np.asarray(stage) > 0, crossing[starts] / 2, 0.0)
        cut = kind if kind is not None and width > 1 and self.pieces.can_split(kind, width) else None
        own = self.points.held if cut is None else self.pieces.held(cut, width)
        held, kept, made = own.parameters[starts, ends], own.kept_at(num_rows), np.zeros(1)
        if self.budget.sums_at_once or self.budget.is_alone:
            gradients = self.pieces.gradients(cut or self.prices.cluster.devices[0].kind, width if cut else 1)
            made = gradients[ends] - gradients[starts]
            held = held - self.prices.let_go(made, self.budget)
        in_flight, recomputed, waiting, share = self._shapes[:, stage]
        active = expected_bytes(in_flight, recomputed, waiting, share, received, kept[ends] - kept[starts], self._entering)
        found: Floats = held + active
        if self.budget.is_alone and self.pipeline.num_chunks == 1:
            m = self.pipeline.num_micro_batch
            found = np.where((in_flight >= m) & (waiting == 0), np.maximum(*going_back(found, made, active / m)), found)
        return found

    @cached_property
    def _shapes(self) -> Floats:
        """Per stage, micro-batches in flight, recomputed and waiting, and the recomputed share: ``[4, stages]``."""
        own = self.pipeline
        shares = [self.policy.share(stage) for stage in range(own.num_stages)]
        return np.array([own.in_flight, own.recomputed, own.waiting, shares], dtype=np.float64)

    @property
    def _entering(self) -> float:
        """Approximate bytes that enter a block."""
        if self._enters is None:
            self._enters = float(np.quantile(self._crossing(self._asked), 0.25)) / 2
        return self._enters

    def _crossing(self, num_rows: int) -> Floats:
        """Per bound, the bytes that cross both ways."""
        crossing: Floats = self.points.crossing_fixed + self.points.crossing_per_row * num_rows
        return crossing
