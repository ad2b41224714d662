"""The cut by bisection is within its precision of the best of all cuts."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from whale.search.sketch.cutting import Stage, cut

units = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=8)
speed = st.sampled_from((1.0, 2.0, 5.0))
speeds = st.lists(st.tuples(speed, speed), min_size=1, max_size=4)
"""Of each device for every other unit: one may be good at what another is not."""


def sums(values: list[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def taken(units: list[float], speeds: list[tuple[float, float]]) -> list[list[float]]:
    """Running sums of the times of units on each device."""
    return [sums([each / speed[index % 2] for index, each in enumerate(units)]) for speed in speeds]


def best(seconds: list[list[float]], held: list[float], room: float) -> float | None:
    """The slowest stage of the best cut, by trying all of them."""
    size = len(held) - 1
    found = [
        max(own[stop] - own[start] for own, (start, stop) in zip(seconds, pairwise((0, *inner, size)), strict=True))
        for inner in combinations(range(1, size), len(seconds) - 1)
        if all(held[stop] - held[start] <= room for start, stop in pairwise((0, *inner, size)))
    ]
    return min(found, default=None)


@given(count=st.integers(1, 8), speeds=speeds)
def test_no_cut_is_faster(count: int, speeds: list[tuple[float, float]]) -> None:
    units = [10.0] * count
    seconds, nothing = taken(units, [(both, both) for both, _ in speeds]), sums([0.0] * count)
    least, found = best(seconds, nothing, 0.0), cut([Stage(own, nothing, nothing, nothing, 1, 0.0) for own in seconds], count)
    assert (found is None) == (least is None)
    if found is not None and least is not None:
        assert least <= max(found.seconds) <= least * 1.01 + 1e-9
        assert found.bounds[0] == 0 and found.bounds[-1] == count


@given(units=units, speeds=speeds, room=st.integers(1, 300).map(float))
def test_every_stage_has_a_unit_that_it_can_take(units: list[float], speeds: list[tuple[float, float]], room: float) -> None:
    seconds, held, nothing = taken(units, speeds), sums(units), sums([0.0] * len(units))
    found = cut([Stage(own, nothing, held, nothing, 1, room) for own in seconds], len(units))
    least = best(seconds, held, room)
    if found is not None:
        assert least is not None and max(found.seconds) >= least
        assert all(stop > start and held[stop] - held[start] <= room for start, stop in pairwise(found.bounds))
