"""The cut into stages against brute force over all cuts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whale.planning.pipeline.partition import _least_maximum, _least_squares


@given(st.integers(1, 4), st.data())
def test_no_cut_has_a_faster_slowest_stage(num_stages: int, data: st.DataObject) -> None:
    num_units = data.draw(st.integers(num_stages, 8))
    work = [data.draw(st.lists(st.integers(0, 5), min_size=num_units, max_size=num_units)) for _ in range(num_stages)]
    receive = data.draw(st.lists(st.integers(0, 3), min_size=num_units + 1, max_size=num_units + 1))
    tables = []
    for stage in range(num_stages):
        table = np.full((num_units + 1, num_units + 1), np.inf)
        for i in range(num_units):
            for j in range(i + 1, num_units + 1):
                table[i, j] = sum(work[stage][i:j]) + (receive[i] if stage else 0)
        tables.append(table)

    def costs(bounds: tuple[int, ...]) -> list[float]:
        return [float(tables[s][bounds[s], bounds[s + 1]]) for s in range(num_stages)]

    every = [(0, *inner, num_units) for inner in combinations(range(1, num_units), num_stages - 1)]
    least = min(max(costs(bounds)) for bounds in every)
    assert _least_maximum(tables) == least
    found = tuple(_least_squares(tables, least))
    assert max(costs(found)) == least
    assert sum(c * c for c in costs(found)) == min(sum(c * c for c in costs(b)) for b in every if max(costs(b)) == least)
