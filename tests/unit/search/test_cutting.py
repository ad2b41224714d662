"""The cut by bisection is within its precision of the best of all cuts, and its bound is below it."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from whale.search.cutting import Stage, cut

units = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=8)
speeds = st.lists(st.sampled_from((1.0, 2.0, 5.0)), min_size=1, max_size=4)


def sums(values: list[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def best(seconds: list[list[float]], held: list[float], room: float) -> float | None:
    """The slowest stage of the best cut, by trying all of them."""
    size = len(held) - 1
    found = [
        max(own[stop] - own[start] for own, (start, stop) in zip(seconds, pairwise((0, *inner, size)), strict=True))
        for inner in combinations(range(1, size), len(seconds) - 1)
        if all(held[stop] - held[start] <= room for start, stop in pairwise((0, *inner, size)))
    ]
    return min(found, default=None)


@given(units=units, speeds=speeds, room=st.integers(1, 300).map(float))
def test_no_cut_is_faster(units: list[float], speeds: list[float], room: float) -> None:
    seconds, held = [sums([each / speed for each in units]) for speed in speeds], sums(units)
    found = cut([Stage(own, [0.0] * len(own), held, room) for own in seconds], len(units))
    least = best(seconds, held, room)
    assert found is not None or least is None
    if found is not None and least is not None:
        assert found.least <= least * (1 + 1e-12) and max(found.seconds) <= least * 1.01 + 1e-9
        assert found.bounds[0] == 0 and found.bounds[-1] == len(units)
