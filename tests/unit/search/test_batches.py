"""The number of rows of a range that is best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.errors import ConfigError, PlanError
from whale.ir.plan import Plan
from whale.search import decide, search
from whale.search.advice import advise
from whale.search.deciding import best_batch, numbers_of_rows
from whale.search.searching import SearchResult

GRAPH = layers([64] * 4)
TWO = made([[(1e9, GIB)] * 2], network=1e9)


def searched(rows: int) -> SearchResult:
    return search(GRAPH, TWO, Config(), rows=rows)


def decided(range_: str, **settings: object) -> Plan:
    return decide(None, GRAPH, TWO, Config({"planning.batch_rows": range_, **settings}))[0]


@pytest.mark.parametrize(
    ("low", "high", "numbers"), [(64, 256, (64, 128, 256)), (3, 20, (3, 6, 12, 20)), (5, 5, (5,)), (1, 2, (1, 2)), (8, 9, (8, 9))]
)
def test_numbers_double_from_the_least_to_the_most(low: int, high: int, numbers: tuple[int, ...]) -> None:
    assert numbers_of_rows(low, high) == numbers


def test_the_most_samples_per_second_win() -> None:
    plan = decided("2..16")
    speeds = {rows: rows / searched(rows).step.step_seconds for rows in (2, 4, 8, 16)}
    assert plan.planned_rows == max(speeds, key=lambda rows: speeds[rows])
    assert plan.choices[0].decision.startswith(f"{plan.planned_rows} rows of 2..16, ")
    assert len(plan.choices[0].runner_up.split("; ")) == 3 and plan.choices[1].pass_name == "search"


def test_the_least_memory_takes_the_fewest_rows() -> None:
    assert decided("4..16", **{"planning.objective": "memory"}).planned_rows == 4


@pytest.mark.slow
def test_what_does_not_fit_is_left_out() -> None:
    tight = made([[(1e9, 700_000)] * 2], network=1e9)
    settings = {"recompute.policy": "none", "pipeline.num_micro_batch": 1, "pipeline.num_stages": 1}
    plan, _ = decide(None, GRAPH, tight, Config({"planning.batch_rows": "64..4096", **settings}))
    assert plan.planned_rows < 4096 and "4096: no plan" in plan.choices[0].runner_up
    with pytest.raises(PlanError):
        decide(None, GRAPH, tight, Config({"planning.batch_rows": "4096..8192", **settings}))


@pytest.mark.parametrize("text", ["64", "256..64", "0..4", "4..x", "a range", "-1..4"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"planning.batch_rows: .* is not like 64\.\.256, whole numbers from 1 to 16,777,216, the smaller first"
    ):
        Config({"planning.batch_rows": text})


def test_what_leaves_no_range_is_an_error() -> None:
    config = Config({"planning.batch_rows": "4..8"})
    with pytest.raises(ConfigError, match=r"rows: 8 and the range planning.batch_rows: 4\.\.8 are both given"):
        decide(None, GRAPH, TWO, config, rows=8)
    with pytest.raises(ConfigError, match=r"planning.batch_rows 4\.\.8 needs a search, but planning.search off leaves nothing to search"):
        decided("4..8", **{"planning.search": "off"})
    with pytest.raises(ConfigError, match="is a range; advice needs one number of rows"):
        advise(GRAPH, TWO, config)


@pytest.mark.parametrize("has_plan", [True, False])
def test_an_interrupt_keeps_the_best_so_far(has_plan: bool) -> None:
    """A search that has a plan ends with it; one that has none is left out."""
    seen = list[int]()

    def interrupted(rows: int) -> SearchResult:
        seen.append(rows)
        if rows == 8 and not has_plan:
            raise KeyboardInterrupt
        return replace(searched(rows), was_interrupted=rows == 8)

    found = best_batch(4, 16, interrupted)
    assert seen == [4, 8] and found.plan.planned_rows in ((4, 8) if has_plan else (4,))
    assert found.plan.choices[0].bound.endswith("the search was interrupted: the best so far")


def test_an_interrupt_before_there_is_a_plan_ends_all() -> None:
    def interrupted(rows: int) -> SearchResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        best_batch(4, 16, interrupted)
