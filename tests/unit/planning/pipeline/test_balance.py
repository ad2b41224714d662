"""Balance against brute force: the least time of the slowest worker, within memory, over all integer divisions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.planning import MemoryLimit, MemoryShortage, balance
from whale.planning.pipeline.balance import Curve, combine


def divisions(total: int, parts: int, minimum: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if total >= minimum:
            yield (total,)
        return
    for first in range(minimum, total + 1):
        for rest in divisions(total - first, parts - 1, minimum):
            yield (first, *rest)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[list[int]], list[MemoryLimit], int]:
    total, workers = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    steps = st.lists(st.integers(0, 4), min_size=total + 1, max_size=total + 1)
    times = [list(np.cumsum(draw(steps))) for _ in range(workers)]
    limits = [MemoryLimit(draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(2, 14)), f"d{i}") for i in range(workers)]
    return total, times, limits, draw(st.integers(0, 1))


@given(tables())
def test_no_division_is_better(case: tuple[int, list[list[int]], list[MemoryLimit], int]) -> None:
    total, times, limits, minimum = case
    workers = range(len(times))

    def excess(sizes: tuple[int, ...]) -> float:
        return max(max(0, limits[i].fixed + limits[i].per_unit * sizes[i] - limits[i].capacity) for i in workers)

    every = list(divisions(total, len(times), minimum))
    if not every:
        with pytest.raises(ValueError):
            balance(total, [lambda n, t=t: t[n] for t in times], limits, minimum)
        return
    fitting = [sizes for sizes in every if excess(sizes) == 0]
    try:
        sizes = balance(total, [lambda n, t=t: float(t[n]) for t in times], limits, minimum)
    except MemoryShortage as error:
        assert not fitting
        assert error.num_bytes == min(excess(sizes) for sizes in every)
        return
    assert sizes in fitting
    assert max(times[i][sizes[i]] for i in workers) == min(max(times[i][s[i]] for i in workers) for s in fitting)


@given(tables())
def test_a_combined_curve_is_the_best_division_at_every_size(case: tuple[int, list[list[int]], list[MemoryLimit], int]) -> None:
    total, times, _, minimum = case
    curves = [Curve(np.array(t, dtype=float), np.zeros(total + 1), minimum) for t in times]
    combined = combine(total, curves)
    for n in range(combined.minimum, total + 1):
        best = min(max(t[size] for t, size in zip(times, sizes, strict=True)) for sizes in divisions(n, len(times), minimum))
        assert combined.seconds[n] == best


def test_speeds_divide_in_proportion() -> None:
    assert balance(12, [lambda n: n / 3, lambda n: n / 1], [None, None]) == (9, 3)


def test_memory_holds_the_fast_device_back() -> None:
    limits = [MemoryLimit(10, 5, 30, "fast"), MemoryLimit(10, 5, 100, "slow")]
    assert balance(10, [lambda n: n / 3, lambda n: n / 1], limits) == (4, 6)


def test_units_that_end_together_go_to_the_earlier_workers() -> None:
    assert balance(7, [float, float, float], [None] * 3) == (3, 2, 2)


def test_a_shortage_says_how_much_and_where() -> None:
    limits = [MemoryLimit(0, 10, 25, "a"), MemoryLimit(0, 10, 25, "b")]
    with pytest.raises(MemoryShortage, match=r"a is .* \(5 bytes\) short") as caught:
        balance(5, [float, float], limits)
    assert caught.value.num_bytes == 5 and caught.value.sizes == (3, 2)
