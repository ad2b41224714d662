"""Balance against brute force: the least time of the slowest worker, within memory, over all integer divisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.planning.pipeline.balance import Curve, MemoryShortage, combine, divide_units

Limit = tuple[float, float, float]
"""Bytes of a worker beside its units, of each unit, and that it has."""


def curve_of(seconds: Sequence[float], limit: Limit = (0, 0, 0), minimum: int = 0, place: str = "") -> Curve:
    """One that needs so many seconds for 0, 1, ... units."""
    fixed, per_unit, capacity = limit
    excess = np.maximum(fixed + per_unit * np.arange(len(seconds)) - capacity, 0.0)
    return Curve(np.array(seconds, dtype=np.float64), excess, minimum, place)


def divisions(total: int, parts: int, minimum: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if total >= minimum:
            yield (total,)
        return
    for first in range(minimum, total + 1):
        for rest in divisions(total - first, parts - 1, minimum):
            yield (first, *rest)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[list[int]], list[Limit], int]:
    total, workers = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    steps = st.lists(st.integers(0, 4), min_size=total + 1, max_size=total + 1)
    times = [list(np.cumsum(draw(steps))) for _ in range(workers)]
    limits = [(draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(2, 14))) for _ in range(workers)]
    return total, times, limits, draw(st.integers(0, 1))  # type: ignore[return-value]


@given(tables())
def test_no_division_is_better(case: tuple[int, list[list[int]], list[Limit], int]) -> None:
    total, times, limits, minimum = case
    workers, curves = range(len(times)), [curve_of(*own, minimum) for own in zip(times, limits, strict=True)]

    def excess(sizes: tuple[int, ...]) -> float:
        return max(curves[i].excess[sizes[i]] for i in workers)

    every = list(divisions(total, len(times), minimum))
    if not every:
        with pytest.raises(ValueError):
            divide_units(total, curves)
        return
    fitting = [sizes for sizes in every if excess(sizes) == 0]
    try:
        sizes = divide_units(total, curves)
    except MemoryShortage as error:
        assert not fitting
        assert error.num_bytes == min(excess(sizes) for sizes in every)
        return
    assert sizes in fitting
    assert max(times[i][sizes[i]] for i in workers) == min(max(times[i][s[i]] for i in workers) for s in fitting)


@given(tables())
def test_a_combined_curve_is_the_best_division_at_every_size(case: tuple[int, list[list[int]], list[Limit], int]) -> None:
    total, times, _, minimum = case
    curves = [curve_of(own, minimum=minimum) for own in times]
    combined = combine(total, curves)
    for n in range(combined.minimum, total + 1):
        best = min(max(t[size] for t, size in zip(times, sizes, strict=True)) for sizes in divisions(n, len(times), minimum))
        assert combined.seconds[n] == best


def speeds(total: int, *speeds: float) -> list[list[float]]:
    return [[count / speed for count in range(total + 1)] for speed in speeds]


def test_speeds_divide_in_proportion() -> None:
    assert divide_units(12, [curve_of(own) for own in speeds(12, 3, 1)]) == (9, 3)


def test_memory_holds_the_fast_device_back() -> None:
    fast, slow = speeds(10, 3, 1)
    assert divide_units(10, [curve_of(fast, (10, 5, 30)), curve_of(slow, (10, 5, 100))]) == (4, 6)


def test_units_that_end_together_go_to_the_earlier_workers() -> None:
    assert divide_units(7, [curve_of(own) for own in speeds(7, 1, 1, 1)]) == (3, 2, 2)


def test_a_shortage_says_how_much_and_where() -> None:
    curves = [curve_of(own, (0, 10, 25), place=place) for own, place in zip(speeds(5, 1, 1), "ab", strict=True)]
    with pytest.raises(MemoryShortage, match=r"a is .* \(5 bytes\) short") as caught:
        divide_units(5, curves)
    assert caught.value.num_bytes == 5 and caught.value.sizes == (3, 2)
