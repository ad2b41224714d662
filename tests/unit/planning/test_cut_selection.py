"""The integer program finds what trying every set finds, and what fits in memory before what is fast."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from whale.planning.cut_figures import Figures, KindFigures
from whale.planning.cut_selection import Selection, Sized, select


@st.composite
def problems(draw: st.DrawFn) -> tuple[Sized, list[tuple[int, ...]], tuple[int, ...]]:
    """Up to five kinds on two devices, some conflicts, sometimes little memory, sometimes one kind that must be cut."""
    num_kinds = draw(st.integers(1, 5))
    seconds = st.integers(0, 20)
    kinds = []
    for _ in range(num_kinds):
        whole, fixed = draw(seconds), draw(seconds)
        cut = np.array([fixed, fixed + draw(seconds), 40.0])
        kinds.append(KindFigures(2, 1, (float(whole),) * 2, (cut, cut), float(draw(seconds)), float(draw(st.integers(0, 8)))))
    sets = st.lists(st.integers(0, num_kinds - 1), min_size=1, max_size=3, unique=True).map(lambda kinds: tuple(sorted(kinds)))
    entering = draw(st.dictionaries(sets, seconds.map(float), max_size=4))
    conflicts = draw(st.lists(sets.filter(lambda kinds: len(kinds) > 1), max_size=3)) if num_kinds > 1 else []
    capacity = draw(st.sampled_from([4, 10, 100]))
    held = sum(kind.num_bytes for kind in kinds) + 1
    figures = Figures(tuple(kinds), tuple(entering.items()), 100.0, held, (capacity, capacity))
    insisted = tuple(draw(st.lists(st.integers(0, num_kinds - 1), max_size=1)))
    return Sized(figures, ((1, 1),) * num_kinds), conflicts, insisted


def by_trying(sized: Sized, conflicts: list[tuple[int, ...]], insisted: tuple[int, ...]) -> list[Selection]:
    kinds = range(len(sized.figures.kinds))
    sets = chain.from_iterable(combinations(kinds, count) for count in range(1, len(kinds) + 1))
    allowed = [own for own in sets if set(insisted) <= set(own) and all(len(set(own) & set(conflict)) <= 1 for conflict in conflicts)]
    return sorted((sized.evaluate(own) for own in allowed), key=lambda found: (round(found.excess, 6), found.seconds))


@given(problems())
@settings(max_examples=60)
def test_the_program_finds_the_best_set_and_the_next_one(problem: tuple[Sized, list[tuple[int, ...]], tuple[int, ...]]) -> None:
    sized, conflicts, insisted = problem
    expected = by_trying(sized, conflicts, insisted)
    found = select(sized, conflicts, insisted)
    assert (found is None) == (not expected)
    if found is None:
        return
    assert abs(found.seconds - expected[0].seconds) < 1e-6 and abs(found.excess - expected[0].excess) < 1e-6
    other = select(sized, conflicts, insisted, found.kinds)
    assert (other is None) == (len(expected) == 1)
    if other is not None:
        assert other.kinds != found.kinds
        assert abs(other.seconds - expected[1].seconds) < 1e-6
