"""The first of the cases that a script draws by their numbers, and that it sees what is wrong."""

from __future__ import annotations

import math
import random

import pytest

import tests.unit.search.many as many
from tests.examples import slow
from tests.unit.search.many import difference, drawn_cluster, drawn_graph, free_case, scoped_case


@pytest.mark.parametrize("number", [0, *map(slow, range(1, 4))])
def test_a_case_of_two_devices_is_equal(number: int) -> None:
    assert free_case(number, 2).difference == 0


def test_a_case_in_scopes_is_equal() -> None:
    assert scoped_case(0, 2).difference == 0


def test_a_case_is_drawn_again_by_its_number() -> None:
    drawn = [(drawn_graph(draw, scoped=True), drawn_cluster(draw, 3)) for draw in (random.Random(7), random.Random(7))]
    assert drawn[0] == drawn[1]


@pytest.mark.slow
def test_a_slower_plan_and_a_missing_one_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(1.1, 1.0) == pytest.approx(0.1)
    assert difference(math.inf, 1.0) == math.inf
    assert difference(math.inf, math.inf) == difference(1.0, math.inf) == difference(0.9, 1.0) == 0
    monkeypatch.setattr(many, "found", lambda *_: 1.0)
    assert free_case(1, 2).difference > 0
