"""Labels that are found are those that trying every labelling finds, and what fits in memory comes before what is fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from whale.planning.shard.classes import WHOLE, Use
from whale.planning.shard.integer import Rows, solve_integer
from whale.planning.shard.program import LabelFigures, Pair, Program, Selection, TensorFigures, UserFigures
from whale.planning.shard.solve import solve

FORMS = (WHOLE, 0, 1)
USES: tuple[Use, ...] = ((WHOLE, False), (WHOLE, True), (0, False), (1, False))


@st.composite
def nodes(draw: st.DrawFn) -> tuple[LabelFigures, ...]:
    """Up to three labels, the first of which is to be whole."""
    seconds = st.integers(0, 20)
    whole = draw(seconds)
    working = float(draw(st.integers(0, 6)))
    found = [LabelFigures((float(whole),) * 2, WHOLE, 0.0, (0.0, 0.0), frozenset(), False, working=(working,) * 2)]
    for lane in draw(st.lists(st.sampled_from([0, 1]), unique=True, max_size=2)):
        own = tuple(float(draw(st.integers(0, max(whole, 1)))) for _ in range(2))
        num_bytes = float(-draw(st.integers(0, 8)))
        parts = tuple(float(draw(st.integers(0, 6))) for _ in range(2))
        divides = draw(st.booleans())
        found.append(LabelFigures(own, lane, float(draw(seconds)), (num_bytes, num_bytes / 2), frozenset({lane}), divides, working=parts))
    return tuple(found)


@st.composite
def tensors(draw: st.DrawFn, made: tuple[tuple[LabelFigures, ...], ...]) -> TensorFigures:
    """A tensor between some nodes; sometimes a parameter, sometimes written in place."""
    seconds = st.integers(0, 20)
    node = draw(st.integers(0, len(made) - 1))
    users = []
    for number in draw(st.lists(st.integers(-1, len(made) - 1), min_size=1, max_size=3, unique=True)):
        uses = tuple(draw(st.sampled_from(USES)) for _ in (made[number] if number >= 0 else [0]))
        users.append(UserFigures(number, uses, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 9)) == 0))
    pairs = {}
    for form, use in product(FORMS, USES):
        if draw(st.booleans()) and (form, False) != use:
            pairs[form, use] = Pair(float(draw(seconds)), float(draw(seconds)), (float(draw(st.integers(0, 3))),) * 2, draw(st.booleans()))
    return TensorFigures(
        node, tuple(draw(st.sampled_from(FORMS)) for _ in made[node]), tuple(users), pairs, float(draw(st.sampled_from([0, 0, 9])))
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Up to five nodes with tensors between, sometimes little memory, sometimes one node that must work along a kind."""
    made = tuple(draw(st.lists(nodes(), min_size=1, max_size=5)))
    between = tuple(draw(st.lists(tensors(made), max_size=5)))
    insisted = [(number, figures.lane) for number, node in enumerate(made) for figures in node[1:]]
    chosen = draw(st.lists(st.sampled_from(insisted), max_size=1)) if insisted else []
    share = draw(st.sampled_from([0.5, 1.0]))
    return Program(made, between, 2, 20.0, (draw(st.sampled_from([8, 14, 100])),) * 2, tuple(chosen), working_share=share)


def by_trying(program: Program) -> list[Selection]:
    every = product(*(range(len(node)) for node in program.nodes))
    found = [selection for labels in every if (selection := program.evaluate(labels)) is not None]
    return sorted(found, key=lambda selection: (round(selection.excess, 6), selection.seconds))


@pytest.mark.slow
@pytest.mark.parametrize("search", [solve, solve_integer])
@given(program=programs())
@at_most(150)
def test_the_best_labels_are_found_and_the_next_set_of_kinds(search: Callable[..., Selection | None], program: Program) -> None:
    expected = by_trying(program)
    found = search(program)
    assert (found is None) == (not expected)
    if found is None:
        return
    assert abs(found.excess - expected[0].excess) < 1.5
    assert abs(found.seconds - min(each.seconds for each in expected if each.excess <= found.excess + 1e-6)) < 1e-6
    others = [each for each in expected if each.kinds != found.kinds]
    other = search(program, found.kinds)
    assert (other is None) == (not others)
    if other is not None:
        assert other.kinds != found.kinds
        assert abs(other.seconds - min(each.seconds for each in others if each.excess <= other.excess + 1e-6)) < 1e-6


@pytest.mark.slow
@given(programs(), st.integers(0, 2))
@at_most(50)
def test_a_search_that_ends_early_says_how_far_from_the_optimum_it_may_be(program: Program, max_nodes: int) -> None:
    roomy = replace(program, capacity=(1000.0,) * 2)
    expected, found = by_trying(roomy), solve_integer(roomy, max_nodes=max_nodes)
    assert found == solve_integer(roomy, max_nodes=max_nodes)
    if found is not None:
        assert expected[0].seconds >= found.seconds * (1 - found.gap) - 1e-6


def test_rows_have_no_large_factors_however_slow_and_large_devices_are() -> None:
    """Rows are kept to 1e-6: with factors of millions of seconds, a search mends its own roundings, and HiGHS 1.12 prints that."""
    whole = LabelFigures((1e6, 3e6), WHOLE, 0.0, (0.0, 0.0), frozenset(), False)
    part = LabelFigures((6e5, 1e6), 0, 1e3, (-4e12, -4e12), frozenset({0}), True)
    rows = Rows(Program(((whole, part),) * 3, (), 1, 2e13, (10**13,) * 2))
    assert max(map(abs, rows.factors)) == 1.0
