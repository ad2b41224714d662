"""Rows and cuts are at least as good as by published rules, on the same costs."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.pipeline.test_balance import Limit, curve_of
from whale.planning.cutting.partition import _least_maximum
from whale.planning.cutting.stage_tables import Band
from whale.planning.pipeline.balance import MemoryShortage, divide_units

speeds = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def by_ratios(num_rows: int, speeds: list[int], limits: list[Limit]) -> list[int] | None:
    """Algorithm 1 of the Whale paper: rows by speed, then shifted from devices that overflow to the least busy; None: no room."""
    exact = [num_rows * speed / sum(speeds) for speed in speeds]
    rows = [int(share) for share in exact]
    for worker in sorted(range(len(rows)), key=lambda worker: rows[worker] - exact[worker])[: num_rows - sum(rows)]:
        rows[worker] += 1

    def used(worker: int, count: int) -> float:
        fixed, per_unit, capacity = limits[worker]
        return (fixed + per_unit * count) / capacity

    while (peak := max(range(len(rows)), key=lambda worker: used(worker, rows[worker]))) is not None and used(peak, rows[peak]) > 1:
        valleys = [worker for worker in range(len(rows)) if worker != peak and used(worker, rows[worker] + 1) <= 1]
        if not valleys or rows[peak] == 0:
            return None
        valley = min(valleys, key=lambda worker: (rows[worker] / speeds[worker], used(worker, rows[worker])))
        rows[peak], rows[valley] = rows[peak] - 1, rows[valley] + 1
    return rows


@given(st.integers(1, 40), speeds, st.data())
def test_rows_are_balanced_as_well_as_by_shifting_ratios(num_rows: int, speeds: list[int], data: st.DataObject) -> None:
    limits = [(1.0, 1.0, float(data.draw(st.integers(1, 40)))) for _ in speeds]
    theirs = by_ratios(num_rows, speeds, limits)
    try:
        ours = divide_units(
            num_rows, [curve_of([count / speed for count in range(num_rows + 1)], own) for speed, own in zip(speeds, limits, strict=True)]
        )
    except MemoryShortage:
        assert theirs is None
        return
    if theirs is not None:
        assert max(map(np.divide, ours, speeds)) <= max(map(np.divide, theirs, speeds))


@given(st.lists(st.integers(0, 9), min_size=4, max_size=12), st.integers(1, 4))
def test_stages_are_cut_as_well_as_by_a_quota(work: list[int], num_stages: int) -> None:
    """Merak's rule: a stage ends where it has its equal part of all work."""
    before, num_units = [0, *accumulate(work)], len(work)
    ends = [next(end for end in range(num_units + 1) if before[end] * num_stages >= before[-1] * stage) for stage in range(1, num_stages)]
    bounds = [0, *ends, num_units]
    band, sums = Band(num_units, num_units), np.array(before, dtype=np.float64)
    table = np.where(band.is_piece, sums[band.ends] - sums[band.starts], np.inf)
    theirs = max(before[stop] - before[start] for start, stop in pairwise(bounds))
    if all(start < stop for start, stop in pairwise(bounds)):
        assert _least_maximum([table] * num_stages, band) <= theirs
