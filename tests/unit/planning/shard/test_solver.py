"""Labels that are found are those that trying every labelling finds, and what fits in memory comes before what is fast."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from whale.planning.shard.classes import WHOLE, Use, User
from whale.planning.shard.problem import BridgeCopies, BridgeCost, ChosenLabels, LabelCost, LabelMemory, LabelProblem, TensorCost
from whale.planning.shard.solver import Rows, solve_labels

FORMS = (WHOLE, 0, 1)
USES: tuple[Use, ...] = ((WHOLE, False), (WHOLE, True), (0, False), (1, False))
NUM_WORKERS = 2


def numbers(draw: st.DrawFn, most: int) -> tuple[float, ...]:
    return tuple(float(draw(st.integers(0, most))) for _ in range(NUM_WORKERS))


@st.composite
def nodes(draw: st.DrawFn) -> tuple[LabelCost, ...]:
    """Up to three labels, the first of which is to be whole."""
    whole = draw(st.integers(0, 20))
    found = [LabelCost((float(whole),) * NUM_WORKERS)]
    for kind in draw(st.lists(st.sampled_from([0, 1]), unique=True, max_size=2)):
        own, fixed = numbers(draw, max(whole, 1)), float(draw(st.integers(0, 20)))
        found.append(LabelCost(own, kind, fixed, frozenset({kind}), draw(st.booleans())))
    return tuple(found)


@st.composite
def tensors(draw: st.DrawFn, made: tuple[tuple[LabelCost, ...], ...]) -> TensorCost:
    """A tensor between some nodes; sometimes a parameter, sometimes written in place."""
    node = draw(st.integers(0, len(made) - 1))
    users = []
    for number in draw(st.lists(st.integers(-1, len(made) - 1), min_size=1, max_size=3, unique=True)):
        uses = tuple(draw(st.sampled_from(USES)) for _ in (made[number] if number >= 0 else [0]))
        users.append(User(number, uses, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 9)) == 0))
    bridges = {}
    for form, use in product(FORMS, USES):
        if draw(st.booleans()) and (form, False) != use:
            bridges[form, use] = BridgeCost(float(draw(st.integers(0, 20))), float(draw(st.integers(0, 20))), draw(st.booleans()))
    forms = tuple(draw(st.sampled_from(FORMS)) for _ in made[node])
    return TensorCost(node, forms, tuple(users), bridges, float(draw(st.sampled_from([0, 0, 9]))))


@st.composite
def memories(draw: st.DrawFn, problem: LabelProblem) -> LabelMemory:
    """Sometimes little."""
    held, working = [], []
    for node in problem.nodes:
        less = [np.zeros(NUM_WORKERS), *(-np.array(numbers(draw, 8)) for _ in node[1:])]
        held.append(np.array(less))
        working.append(np.array([numbers(draw, 6) for _ in node]))
    copies = []
    for tensor in problem.tensors:
        num_bytes = {place: np.array(numbers(draw, 3)) for place in tensor.bridges}
        copies.append(BridgeCopies(tensor, tuple(user.keeps for user in tensor.users), num_bytes))
    free = np.array([float(draw(st.sampled_from([-12, -6, 80])))] * NUM_WORKERS)
    return LabelMemory(free, tuple(held), tuple(working), tuple(copies))


@st.composite
def problems(draw: st.DrawFn) -> LabelProblem:
    """Up to five nodes with tensors between, sometimes little memory, sometimes one node that must work along a kind."""
    made = tuple(draw(st.lists(nodes(), min_size=1, max_size=5)))
    between = tuple(draw(st.lists(tensors(made), max_size=5)))
    insisted = [(number, label.along) for number, node in enumerate(made) for label in node[1:]]
    chosen = draw(st.lists(st.sampled_from(insisted), max_size=1)) if insisted else []
    problem = LabelProblem(made, between, 2, tuple(chosen))
    return replace(problem, memory=draw(st.one_of(st.none(), memories(problem))))


def every(problem: LabelProblem) -> list[ChosenLabels]:
    """All labels that are allowed, the best first."""
    tried = product(*(range(len(node)) for node in problem.nodes))
    found = [chosen for labels in tried if (chosen := problem.evaluate(labels)) is not None]
    return sorted(found, key=lambda chosen: (round(chosen.excess, 6), chosen.seconds))


@pytest.mark.slow
@given(problems())
@at_most(150)
def test_the_best_labels_are_found(problem: LabelProblem) -> None:
    expected = every(problem)
    found = solve_labels(problem)
    assert (found is None) == (not expected)
    if found is None:
        return
    assert found.excess == pytest.approx(expected[0].excess, abs=1e-6)
    assert found.seconds == pytest.approx(expected[0].seconds, abs=1e-6)


@pytest.mark.slow
@given(problems(), st.integers(0, 2))
@at_most(50)
def test_a_search_that_ends_early_says_how_far_from_the_optimum_it_may_be(problem: LabelProblem, max_nodes: int) -> None:
    roomy = replace(problem, memory=None)
    expected, found = every(roomy), solve_labels(roomy, max_nodes=max_nodes)
    assert found == solve_labels(roomy, max_nodes=max_nodes)
    if found is not None:
        assert expected[0].seconds >= found.seconds * (1 - found.gap) - 1e-6


@given(st.data(), problems())
@at_most(50)
def test_what_fits_in_a_memory_fits_in_one_that_is_never_smaller(data: st.DataObject, problem: LabelProblem) -> None:
    own, other = data.draw(memories(problem)), data.draw(memories(problem))
    assert own.fits_where(own)
    other = data.draw(st.sampled_from([other, replace(own, free=other.free - 20, held=other.held)]))
    if own.fits_where(other):
        for labels in product(*(range(len(node)) for node in problem.nodes)):
            assert (other.lacking(labels) > 0).any() or (own.lacking(labels) <= 0).all()
    if not own.may_suffice:
        assert all((own.lacking(labels) > 0).any() for labels in product(*(range(len(node)) for node in problem.nodes)))


def test_rows_have_no_large_factors_however_slow_and_large_devices_are() -> None:
    """Rows are kept to 1e-6: with factors of millions of seconds, a search mends its own roundings, and HiGHS 1.12 prints that."""
    node = LabelCost((1e6, 3e6)), LabelCost((6e5, 1e6), 0, 1e3, frozenset({0}), True)
    held = np.array([[0.0, 0.0], [-4e12, -4e12]])
    memory = LabelMemory(np.array([-1e13, -1e13]), (held,) * 3, (0 * held,) * 3, ())
    assert max(map(abs, Rows(LabelProblem((node,) * 3, (), 1, memory=memory)).factors)) == 1.0
