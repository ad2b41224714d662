"""The deepest model that fits, found with few plans, for each state."""

from __future__ import annotations

from typing import Any, cast

import pytest

from whale.config import Config
from whale.errors import PlanError
from whale.search.largest import MAX_BLOCKS, largest, open_states


def found(limits: dict[tuple[str, str], int], config: Config | None = None) -> tuple[list[tuple[str, str, int]], int]:
    """The depth by state where so many blocks fit, and the plans that it took."""
    num_plans = 0

    def decided(graph: Any, settings: Config) -> Any:
        nonlocal num_plans
        num_plans += 1
        if graph > limits.get((settings.memory.zero, settings.memory.offload), 0):
            raise PlanError("it does not fit")
        return "plan", "step"

    tell = lambda _: None  # noqa: E731
    sizes = largest(lambda number: cast(Any, number), 2, decided, config or Config(), tell)
    return [(each.zero, each.offload, each.num_blocks) for each in sizes], num_plans


@pytest.mark.parametrize("limit", [2, 3, 17, 64, 99, 1000])
def test_the_deepest_is_within_one_part_in_25(limit: int) -> None:
    sizes, num_plans = found({("0", "none"): limit, ("2", "none"): 2 * limit})
    for (zero, _, num_blocks), most in zip(sizes, (limit, 2 * limit), strict=True):
        assert most - max(1, most // 25) <= num_blocks <= most, zero
    assert sizes[0][2] <= sizes[1][2] and num_plans < 50


def test_states_that_settings_leave_open() -> None:
    assert open_states(Config()) == (("0", "none"), ("2", "none"), ("3", "none"), ("3", "optimizer"), ("3", "optimizer+parameters"))
    assert open_states(Config({"memory.zero": "2"})) == (("2", "none"), ("2", "optimizer"), ("2", "optimizer+parameters"))
    assert open_states(Config({"memory.offload": "none"})) == (("0", "none"), ("2", "none"), ("3", "none"))
    assert open_states(Config({"memory.zero": "0", "memory.offload": "optimizer"})) == (("0", "optimizer"),)


def test_there_is_an_end_and_nothing_that_fits_is_an_error() -> None:
    assert found({("0", "none"): 10**9}, Config({"memory.zero": "0", "memory.offload": "none"}))[0] == [("0", "none", MAX_BLOCKS)]
    assert found({("3", "none"): 5})[0] == [("3", "none", 5)], "states that do not fit the model as it is are left out"
    with pytest.raises(PlanError, match="it does not fit"):
        found({})


def test_a_plan_that_the_longer_search_misses_is_kept() -> None:
    def decided(graph: Any, settings: Config) -> Any:
        if graph > 5 or settings.planning.effort > 20:
            raise PlanError("it does not fit")
        return f"plan of {graph}", "step"

    config = Config({"memory.zero": "0", "memory.offload": "none"})
    (size,) = largest(lambda number: cast(Any, number), 2, decided, config, lambda _: None)
    assert (size.num_blocks, size.plan) == (5, "plan of 5")
