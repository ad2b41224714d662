"""A cut that is found soon, for a first look at pipelines of many ranks: within a time every stage takes as much as it can, in order.

The least time within which the model ends is that of the slowest stage of every cut between places where little crosses; it is sought by
bisection. `whale.planning.cutting.partition` has the cut that is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from whale.ir.cluster import Device
from whale.planning.cutting.partition import check_places
from whale.planning.cutting.stage_tables import StageTables
from whale.planning.strategy import Placed

HEAVY = 8.0
"""A model is not cut where so many times as much crosses as at a light place, as long as there are other places."""

NEAR = 0.005
"""The time is sought until it is known to this share of it."""

Sums = list[float]


def fill(tables: StageTables, placed: Placed, num_rows: int) -> tuple[int, ...]:
    """The bounds of the cut, in units; where what stages hold fits in none, as if memory were boundless.

    Args:
        tables: of the pipeline.
        placed: the devices of each rank.
        num_rows: of a micro-batch.
    """
    check_places(tables)
    places = light_places(tables, num_rows)
    sums = [_sums(tables, stage, placed, num_rows, places) for stage in range(tables.pipeline.num_stages)]
    found = _least(sums, len(places) - 1, None)
    assert found is not None, "there is a unit for every stage"
    bounds: Sequence[int] = places[found].tolist()
    if np.any(tables.loads(placed, num_rows, bounds) > tables.rooms(placed)):
        lowest = tables.lowest(placed, num_rows, 1.0)[:, places].tolist()
        fitting = _least(sums, len(places) - 1, partial(_fits, lowest, places.tolist()))
        bounds = bounds if fitting is None else places[fitting].tolist()
    return tuple(bounds)


def light_places(tables: StageTables, num_rows: int) -> NDArray[np.int64]:
    """The places where little crosses, first and last among them; all, where these are too few for the stages."""
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
    """Seconds of all that is before each place, on a device of a stage or its host."""
    kind: Device = tables.prices.kinds[placed[tables.pipeline.stage_rank[stage]][0]]
    return tables.running(stage, kind, placed, num_rows, places)


def _least(sums: Sequence[Sums], num_units: int, fits: Callable[[int, int, int], bool] | None) -> list[int] | None:
    totals = [own[-1] for own in sums]
    most = max(totals)
    found = _within(sums, num_units, most, fits)
    if found is None:
        return None
    low, high = 0.0, 1 / sum(1 / max(total, 1e-30) for total in totals)
    while (nearer := _within(sums, num_units, high, fits)) is None:
        low, high = high, min(1.5 * high, most)
    found = nearer
    while high - low > NEAR * high:
        middle = (low + high) / 2
        nearer = _within(sums, num_units, middle, fits)
        if nearer is None:
            low = middle
        else:
            high, found = middle, nearer
    return found


def _within(sums: Sequence[Sums], num_units: int, limit: float, fits: Callable[[int, int, int], bool] | None) -> list[int] | None:
    """The bounds of a cut with no stage above a time, each with a unit at least; None where there is none."""
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
