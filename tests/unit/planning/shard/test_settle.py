"""Elimination finds what trying every value finds, and labels that it settles are those of the integer program."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.shard.test_program import by_trying, programs
from whale.planning.shard.elimination import Table, minimise, order_of
from whale.planning.shard.program import LabelFigures, Program
from whale.planning.shard.settle import Unsettled, settle
from whale.planning.shard.within import Within


@st.composite
def sums(draw: st.DrawFn) -> tuple[list[int], list[Table]]:
    """Up to five variables of up to three values, and tables over some of them, with values that do not go together."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    tables = []
    for variables in draw(st.lists(st.permutations(range(len(sizes))).map(lambda order: order[:3]), max_size=5)):
        shape = [sizes[variable] for variable in variables]
        values = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, inf]), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        tables.append(Table(tuple(variables), np.array(values).reshape(shape)))
    return sizes, tables


def total(tables: list[Table], values: tuple[int, ...]) -> float:
    return float(sum(table.values[tuple(values[variable] for variable in table.variables)] for table in tables))


@given(sums())
@at_most(100)
def test_elimination_finds_the_least_sum(given_sum: tuple[list[int], list[Table]]) -> None:
    sizes, tables = given_sum
    found = minimise(sizes, tables, 3**5)
    assert found is not None
    assert found[0] == min(total(tables, values) for values in product(*map(range, sizes)))
    if found[0] < inf:
        assert total(tables, found[1]) == found[0]


@given(sums(), st.data())
@at_most(100)
def test_the_least_sum_within_a_room_is_found(given_sum: tuple[list[int], list[Table]], data: st.DataObject) -> None:
    sizes, tables = given_sum
    weighed = []
    for table in tables:
        size = table.values.size
        weights = np.array(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))).reshape(table.values.shape)
        weighed.append(Table(table.variables, np.where(np.isinf(table.values), inf, weights)))
    room = float(data.draw(st.integers(0, 9)))
    order = order_of(sizes, [table.variables for table in tables], 3**5)
    assert order is not None
    every = [values for values in product(*map(range, sizes)) if total(tables, values) < inf and total(weighed, values) <= room]
    found = Within(
        order, [table.values for table in tables], [table.values for table in weighed], room, lambda values: total(tables, values)
    ).found()
    assert (found is None) == (not every)
    if found is not None:
        assert found.values in every
        assert found.cost == min(total(tables, values) for values in every)


def test_a_table_that_would_be_too_large_is_not_made() -> None:
    ring = [Table((index, (index + 1) % 4), np.zeros((3, 3))) for index in range(4)]
    assert minimise([3] * 4, ring, 26) is None
    assert minimise([3] * 4, ring, 27) == (0.0, (0, 0, 0, 0))


@pytest.mark.slow
@given(programs(), st.booleans())
@at_most(200)
def test_labels_that_are_settled_are_the_best(program: Program, for_runner_up: bool) -> None:
    roomy = replace(program, capacity=(1000,) * 2)
    expected = by_trying(roomy)
    kinds = expected[0].kinds if expected and for_runner_up else None
    expected = [each for each in expected if each.kinds != kinds]
    try:
        found = settle(roomy, kinds)
    except Unsettled:
        return
    assert (found is None) == (not expected)
    if found is not None:
        assert found.kinds != kinds
        assert found.seconds == pytest.approx(min(each.seconds for each in expected))


def alike(program: Program) -> Program:
    """The same on devices that are all like the first."""

    def both(label: LabelFigures) -> LabelFigures:
        return replace(label, **{name: getattr(label, name)[:1] * 2 for name in ("seconds", "num_bytes", "working")})

    nodes = tuple(tuple(map(both, node)) for node in program.nodes)
    return replace(program, nodes=nodes)


@pytest.mark.slow
@given(programs(), st.integers(8, 24), st.booleans())
@at_most(200)
def test_labels_of_devices_that_are_alike_are_settled_where_memory_is_short(program: Program, capacity: int, for_runner_up: bool) -> None:
    short = replace(alike(program), capacity=(capacity,) * 2)
    expected = by_trying(short)
    kinds = expected[0].kinds if expected and for_runner_up else None
    expected = [each for each in expected if each.kinds != kinds]
    found = settle(short, kinds)
    assert (found is None) == (not expected)
    if found is not None:
        assert found.kinds != kinds
        assert found.excess == pytest.approx(expected[0].excess, abs=1.5)
        assert found.seconds == pytest.approx(min(each.seconds for each in expected if each.excess <= found.excess + 1e-6))


@pytest.mark.slow
@given(programs())
@at_most(50)
def test_devices_that_are_alike_leave_nothing_unsettled(program: Program) -> None:
    settle(replace(alike(program), capacity=(1000,) * 2))


@given(programs(), st.integers(8, 24), st.integers(1, 3), st.integers(-6, 6))
@at_most(50)
def test_what_fits_in_a_program_fits_in_one_that_has_room_of_it(program: Program, capacity: int, in_flight: int, more: int) -> None:
    kept = tuple(tuple(replace(label, kept=label.num_bytes) for label in node) for node in program.nodes)
    own = replace(program, nodes=kept, capacity=(capacity,) * 2)
    other = replace(own, in_flight=in_flight, num_bytes=own.num_bytes + more)
    assert own.has_room_of(own)
    if own.has_room_of(other):
        for labels in product(*(range(len(node)) for node in program.nodes)):
            fitting = other.evaluate(labels)
            placed = own.evaluate(labels)
            assert fitting is None or fitting.excess > 0 or (placed is not None and placed.excess <= 0)
