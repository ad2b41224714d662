"""How whole units are divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.division import divide, divide_evenly, intervals

weights = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


@given(weights)
def test_weights_that_sum_to_the_total_come_back(values: list[int]) -> None:
    assert divide(sum(values), values) == tuple(values)


@given(st.integers(0, 500), weights, st.integers(0, 4))
def test_every_unit_is_given_out_fairly(total: int, values: list[int], minimum: int) -> None:
    takers = sum(value > 0 for value in values)
    if total < minimum * takers:
        with pytest.raises(ValueError, match=f"{total} cannot be divided over {takers} parts of at least {minimum}"):
            divide(total, values, minimum)
        return
    sizes = divide(total, values, minimum)
    assert sum(sizes) == total
    assert all(size >= minimum if value else size == 0 for size, value in zip(sizes, values, strict=True))
    if minimum == 0:  # nobody is off by a whole unit
        assert all(abs(size - total * value / sum(values)) < 1 + 1e-9 for size, value in zip(sizes, values, strict=True))


@given(st.integers(0, 100), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=8))
def test_every_part_gets_what_it_must_have(extra: int, parts: list[tuple[int, int]]) -> None:
    values, least = [value for value, _ in parts], [minimum for _, minimum in parts]
    sizes = divide(sum(least) + extra, values, least)
    assert sum(sizes) == sum(least) + extra
    assert all(size >= minimum for size, minimum in zip(sizes, least, strict=True))
    with pytest.raises(ValueError, match="cannot be divided"):
        divide(sum(least) - 1, values, least)


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_more_weight_is_never_less(total: int, values: list[float]) -> None:
    sizes = divide(total, values)
    for a, size_a in zip(values, sizes, strict=True):
        for b, size_b in zip(values, sizes, strict=True):
            assert a <= b * (1 + 1e-9) or size_a >= size_b


@given(st.integers(0, 500), st.integers(1, 20))
def test_even_parts_differ_by_one_at_most(total: int, num_parts: int) -> None:
    sizes = divide_evenly(total, num_parts)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 9))
def test_intervals_follow_one_another(sizes: list[int], start: int) -> None:
    found = intervals(sizes, start)
    assert [stop - begin for begin, stop in found] == sizes
    ends = [start, *(stop for _, stop in found)]
    assert [begin for begin, _ in found] == ends[:-1]


def test_examples() -> None:
    assert divide(8, (5, 3)) == (5, 3)
    assert divide(7, (1, 1)) == (4, 3)
    assert divide(3, (100, 1, 1), minimum=1) == (1, 1, 1)
    assert divide_evenly(7, 3) == (3, 2, 2)
    assert intervals((5, 3)) == ((0, 5), (5, 8))
