"""Cuts a model without scopes into contiguous stages: the slowest is fastest, within each device's memory.

    best[s][j] = min over i < j of max(best[s-1][i], cost_s(i, j))

over the units of `whale.planning.pipeline.cut_points`, where cost_s is the time of the piece from i to j on the device of
stage s for one micro-batch, with its messages: values that it reads, gradients of what it makes; nothing for those that
stay on its rank. Among cuts with the same slowest piece the least sum of squares balances the others. Only pieces up to
some length are tried; longer ones if a better cut may have one.

For a first estimate of pipelines with many ranks `fill` is faster: within a time limit every stage takes as much as it
can, in order, cutting where little crosses; the least feasible limit is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from whale.errors import ConfigError, PlanError
from whale.estimate.costs.line import Floats
from whale.ir.cluster import Device
from whale.planning.cutting.stage_tables import Band, StageTables
from whale.planning.pipeline.cut_points import CutPoints, over_pieces
from whale.planning.strategy import Placed
from whale.planning.structure.stages import Wish

LENGTHS = 2  # pieces of at most this multiple of the average length are tried first: a matter of time alone, no plan depends on it

EQUAL = 1e-12  # relative difference of equal times


@dataclass(frozen=True)
class Partition:
    """A cut."""

    bounds: tuple[int, ...]  # indices into the spine where stages start, and its length
    units: tuple[int, ...]  # the same in units of the cut points
    _slowest: Callable[[Iterable[int]], float] = field(compare=False, repr=False)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage for one micro-batch."""
        return self._slowest(self.units)

    @property
    def even(self) -> float:
        """The same with equally many ops per stage."""
        return self._slowest(np.linspace(0, self.units[-1], len(self.units)).round().astype(int))


def cut_into_stages(tables: StageTables, placed: Placed, num_rows: int, margin: float, look: Hashable) -> Partition:
    """Finds the stages of one replica.

    Args:
        tables: costs of the pieces as stages.
        placed: the devices of each rank.
        num_rows: rows of a micro-batch.
        margin: share of the devices' memory to use, since bytes are approximate here.
        look: equal for replicas on equal devices with equal links.

    Raises:
        PlanError: there are fewer places to cut than stages need.
        ConfigError: the same, with several chunks per rank.
    """
    check_places(tables)
    points = tables.points
    known, key = tables.pieces.cuts, (look, num_rows, tables.look)
    if key not in known:
        known[key] = tuple(_best_of(tables, placed, num_rows, None))
    chosen: Sequence[int] = known[key]
    if not tables.fit(placed, num_rows, chosen, margin):
        chosen = _best_of(tables, placed, num_rows, margin)

    def slowest(bounds: Iterable[int]) -> float:
        return max(tables.by_stage(placed, num_rows, tuple(bounds)))

    return Partition(tuple(int(points.bounds[index]) for index in chosen), tuple(chosen), slowest)


def check_places(tables: StageTables) -> None:
    """Raises as `cut_into_stages` if there are too few places to cut."""
    points, pipeline = tables.points, tables.pipeline
    if points.num_units < pipeline.num_stages:
        if pipeline.num_chunks > 1:
            raise ConfigError(
                f"the model cannot be cut into the {pipeline.num_stages} stages of schedule {pipeline.schedule} with "
                f"{pipeline.num_chunks} chunks on {pipeline.num_ranks} ranks: at most {points.num_units}",
                hint="fewer chunks (pipeline.num_chunks) or stages (pipeline.num_stages)",
            )
        raise PlanError(
            f"the model cannot be cut into {pipeline.num_stages} stages: it has {points.num_units - 1} places to cut",
            hint="fewer stages (pipeline.num_stages)",
        )


def _best_of(tables: StageTables, placed: Placed, num_rows: int, margin: float | None) -> list[int]:
    """The bounds of the best cut, in units; `margin` None ignores memory.

    Where ranks have several stages, what stays there depends on where the others are cut: the cut is made again with what is sent in the
    first, and the better one counts. In 24 searches over random models this makes three plans 0.5 to 21 % faster and
    one 0.1 % slower; none differs where it is made up to five times more.
    """
    first = _best_beside(tables, placed, num_rows, margin, None)
    if tables.pipeline.num_chunks == 1 or not tables.points.are_skipped(first):
        return first
    again = _best_beside(tables, placed, num_rows, margin, first)
    return min(first, again, key=lambda bounds: _by_slowest(tables, placed, num_rows, bounds))


def _by_slowest(tables: StageTables, placed: Placed, num_rows: int, bounds: Sequence[int]) -> tuple[float, float]:
    """The slowest stage of a cut, and the sum of squares."""
    seconds = tables.by_stage(placed, num_rows, bounds)
    return max(seconds), sum(own * own for own in seconds)


def _best_beside(tables: StageTables, placed: Placed, num_rows: int, margin: float | None, others: Sequence[int] | None) -> list[int]:
    """The same if messages past a stage are sent as in the cut `others`; None: all of them by the neighbour."""
    num_units, num_stages = tables.points.num_units, tables.pipeline.num_stages
    longest = min(num_units, LENGTHS * -(-num_units // num_stages))
    while (chosen := _chosen(tables, placed, num_rows, margin, Band(num_units, longest), others)) is None:
        longest = min(num_units, 2 * longest)
    return chosen


def _chosen(
    tables: StageTables, placed: Placed, num_rows: int, margin: float | None, band: Band, others: Sequence[int] | None = None
) -> list[int] | None:
    """The same within a band; None where longer pieces may be in a better cut."""
    stages = range(tables.pipeline.num_stages)
    growing = [tables.times(stage, placed, num_rows, band) for stage in stages]
    answers = [tables.answers(stage, placed, num_rows, band) for stage in stages]
    if others is not None:
        for stage in stages:
            for times, spans in zip((growing, answers), tables.skipping(stage, placed, num_rows, others), strict=True):
                more = over_pieces(tables.points.num_units, 1, [(span, (own,)) for span, own in spans])
                times[stage] = times[stage] + more[0, band.starts, band.ends]
    if margin is not None:
        lowest = tables.lowest(placed, num_rows, margin)
        growing = [np.where(band.starts < low[:, None], np.inf, own) for own, low in zip(growing, lowest, strict=True)]
    seconds = [own + answered for own, answered in zip(growing, answers, strict=True)]
    slowest = _least_maximum(seconds, band)
    if not _is_enough(growing, slowest, band):  # gradients may take less time at a later place
        return None
    if np.isinf(slowest):  # nothing fits: come as near as can be, the check of the whole plan says what is missing
        assert margin is not None, "every model can be cut somewhere"
        seconds = [tables.excess(stage, placed, num_rows, margin, band) for stage in stages]
        slowest = _least_maximum(seconds, band)
        if not _is_enough(seconds, slowest, band):
            return None
    return _least_squares(seconds, slowest, band)


def _is_enough(tables: Sequence[Floats], slowest: float, band: Band) -> bool:
    """Whether no piece longer than the band's can be in a cut whose slowest piece is this fast."""
    limits = (table[band.longest : -1, 0] for table in tables)  # as long as may be, and could be longer
    return all(np.all(np.isinf(own) | (own > slowest * (1 + EQUAL))) for own in limits)


def wishes_of(points: CutPoints, partition: Partition) -> dict[str, Wish]:
    """The stage of each op; floating ops have no wish."""
    stages = np.searchsorted(partition.bounds, np.arange(len(points.spine)), side="right") - 1
    wishes = [Wish((stage,)) for stage in range(len(partition.bounds) - 1)]
    return {name: wishes[stage] for name, stage in zip(points.spine, stages, strict=True) if name not in points.floating}


def _least_maximum(tables: Sequence[Floats], band: Band) -> float:
    best, found = band.before(), np.empty_like(tables[0])
    for table in tables:
        np.maximum(band.windows(best), table, out=found)
        best = band.padded(found.min(axis=1))
    return float(best[-1])


def _least_squares(tables: Sequence[Floats], slowest: float, band: Band) -> list[int]:
    """The bounds with the least sum of squares among those with no piece above `slowest`."""
    best, choices, rows = band.before(), list[NDArray[np.int64]](), np.arange(band.num_units + 1)
    for table in tables:
        total = np.where(table <= slowest * (1 + EQUAL), table, np.inf)
        total *= total
        total += band.windows(best)
        columns = total.argmin(axis=1)  # of equal ones the longest piece
        choices.append(band.starts[rows, columns])
        best = band.padded(total[rows, columns])
    bounds = [band.num_units]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return bounds[::-1]


HEAVY = 8.0
"""No cut where more than this multiple of a light place's bytes crosses, while there are other places. Halved or doubled: the plan for 64
devices of three types is the same.
"""

TIME_TOLERANCE = 0.005  # relative precision of the bisection; halved or doubled: the plan for 64 devices of three types is the same

Sums = list[float]


def fill(tables: StageTables, placed: Placed, num_rows: int) -> tuple[int, ...]:
    """The bounds of the quick cut, in units; ignores memory where nothing fits."""
    check_places(tables)
    places = light_places(tables, num_rows)
    sums = [_sums(tables, stage, placed, num_rows, places) for stage in range(tables.pipeline.num_stages)]
    found = _least(sums, len(places) - 1, None)
    assert found is not None, "there is a unit for every stage"
    bounds: Sequence[int] = places[found].tolist()
    if not tables.fit(placed, num_rows, bounds):
        lowest = tables.lowest(placed, num_rows, 1.0)[:, places].tolist()
        fitting = _least(sums, len(places) - 1, partial(_fits, lowest, places.tolist()))
        bounds = bounds if fitting is None else places[fitting].tolist()
    return tuple(bounds)


def light_places(tables: StageTables, num_rows: int) -> NDArray[np.int64]:
    """The places where little crosses, with both ends; all places, if these are too few for the stages."""
    points = tables.points
    crossing = points.crossing_fixed + points.crossing_per_row * num_rows
    inner = crossing[1:-1] if len(crossing) > 2 else crossing
    few = crossing <= HEAVY * np.quantile(inner, 0.25)
    few[[0, -1]] = True
    places = np.flatnonzero(few)
    return places if len(places) > tables.pipeline.num_stages else np.arange(len(crossing))


def _fits(lowest: Sequence[Sequence[int]], places: Sequence[int], stage: int, start: int, stop: int) -> bool:
    return places[start] >= lowest[stage][stop]


def _sums(tables: StageTables, stage: int, placed: Placed, num_rows: int, places: NDArray[np.int64]) -> Sums:
    """Seconds of all that is before each place, on a stage's device or its host."""
    kind: Device = tables.prices.kinds[placed[tables.pipeline.stage_rank[stage]][0]]
    return tables.running(stage, kind, placed, num_rows, places)


def _least(sums: Sequence[Sums], num_units: int, fits: Callable[[int, int, int], bool] | None) -> list[int] | None:
    totals = [own[-1] for own in sums]
    most = max(totals)
    found = _bounds_below(sums, num_units, most, fits)
    if found is None:
        return None
    low, high = 0.0, 1 / sum(1 / max(total, 1e-30) for total in totals)
    while (nearer := _bounds_below(sums, num_units, high, fits)) is None:
        low, high = high, min(1.5 * high, most)
    found = nearer
    while high - low > TIME_TOLERANCE * high:
        middle = (low + high) / 2
        nearer = _bounds_below(sums, num_units, middle, fits)
        if nearer is None:
            low = middle
        else:
            high, found = middle, nearer
    return found


def _bounds_below(sums: Sequence[Sums], num_units: int, limit: float, fits: Callable[[int, int, int], bool] | None) -> list[int] | None:
    """A cut with no stage above `limit` seconds, with at least one unit each; None where there is none."""
    bounds = [0]
    for stage, own in enumerate(sums):
        start = bounds[-1]
        stop = min(bisect_right(own, own[start] + limit * (1 + 1e-12), start) - 1, num_units - (len(sums) - 1 - stage))
        if fits is not None:
            while stop > start and not fits(stage, start, stop):
                stop -= 1
        if stop <= start:
            return None
        bounds.append(stop)
    return bounds if bounds[-1] == num_units else None
