"""Ctrl-C ends a search with the best plan so far, wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.planning.plan import EstimatedPlan
from whale.planning.realizing import Realizer
from whale.planning.strategy import Strategy
from whale.search import decide, search
from whale.search.ranking import FreeSpace
from whale.search.searching import Run, SearchResult

GRAPH = layers([64] * 4)
TWO = made([[(1e9, GIB)] * 2], network=1e9)


def found_on_two(**settings: object) -> SearchResult:
    return search(GRAPH, TWO, Config(settings), rows=8)


def once(place: Callable[..., Any]) -> Callable[..., Any]:
    """What is interrupted when it is called the first time."""
    calls = list[object]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return place(*args, **kwargs)

    return interrupted


def test_among_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    realized, seen = Realizer.realize, list[Strategy]()

    def interrupted(self: Realizer, strategy: Strategy) -> EstimatedPlan:
        seen.append(strategy)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return realized(self, strategy)

    monkeypatch.setattr(Realizer, "realize", interrupted)
    found = found_on_two()
    assert found.was_interrupted and found.num_planned == 1
    assert found.plan.choices[0].bound == "the search was interrupted: the best of 1 plan so far"


PLACES = [(Run, "_reach"), (EstimatedPlan, "finished")]


@pytest.mark.parametrize(("home", "place"), [pytest.param(*each, id=each[1]) for each in PLACES])
def test_where_the_search_has_a_plan(monkeypatch: pytest.MonkeyPatch, home: type, place: str) -> None:
    whole = found_on_two()
    monkeypatch.setattr(home, place, once(getattr(home, place)))
    found = found_on_two()
    assert found.was_interrupted and "interrupted" in found.plan.choices[0].bound
    assert whole.value <= found.value


def test_before_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeSpace, "ranked", once(FreeSpace.ranked))
    with pytest.raises(KeyboardInterrupt):
        found_on_two()


def test_the_plan_without_a_search_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config({"pipeline.num_stages": 2})
    monkeypatch.setattr(FreeSpace, "ranked", once(FreeSpace.ranked))
    plan, step = decide(None, GRAPH, TWO, config, rows=8)
    assert plan.step_seconds == step.step_seconds
    assert plan.choices[0].decision == "1 x (2 x 1e+09), 1f1b, 1 micro-batch"
    assert plan.choices[0].bound == "the search was interrupted: the best of 1 plan so far"


def test_a_plan_of_the_state_before_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second state is looked at because with the first all is computed again."""
    small, states = made([[(1e9, 200_000)] * 2], network=1e9), list[str]()
    realized = Realizer.realize

    def interrupted(self: Realizer, strategy: Strategy) -> EstimatedPlan:
        states.append(str(self.prices.costs.zero))
        if states[0] != states[-1]:
            raise KeyboardInterrupt
        return realized(self, strategy)

    monkeypatch.setattr(Realizer, "realize", interrupted)
    found = search(GRAPH, small, Config({"planning.objective": "memory"}), rows=8)
    assert states == ["0"] * (len(states) - 1) + ["2"]
    assert found.was_interrupted and "memory.zero" not in found.plan.choices[0].decision


def test_a_second_one_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: EstimatedPlan) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EstimatedPlan, "finished", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found_on_two()
