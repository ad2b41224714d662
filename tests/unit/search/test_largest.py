"""The deepest model that fits, found with few plans, for each state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from whale.config import Config
from whale.errors import OutOfMemory, PlanError
from whale.hardware import parse_cluster
from whale.ir.graph import ModelGraph
from whale.planning.strategy import strategy_of
from whale.search import decide
from whale.search.largest import MAX_BLOCKS, Depths, largest, open_states
from whale.workloads import GPT, repeat_blocks


def planned(number: int) -> Any:
    """A plan by the strategy of that number, with its estimate."""
    return SimpleNamespace(number=number, is_sharded=number % 2 > 0), SimpleNamespace(step_seconds=number)


@dataclass
class Stated:
    """Depths that fit, as they are stated: by state, of each strategy; searches find the first that fits."""

    limits: dict[tuple[str, str], tuple[int, ...]]
    bound: int = MAX_BLOCKS
    num_captured: int = 2
    num_plans: int = field(default=0)

    def graph(self, num_blocks: int) -> int:
        return num_blocks

    def most(self, config: Config) -> int:
        return self.bound

    def _limits(self, config: Config) -> tuple[int, ...]:
        return self.limits.get((config.memory.zero, config.memory.offload), ())

    def searched(self, num_blocks: int, config: Config) -> Any:
        self.num_plans += 1
        for number, limit in enumerate(self._limits(config)):
            if num_blocks <= limit:
                return planned(number)
        raise OutOfMemory("it does not fit")

    def again(self, num_blocks: int, config: Config, plan: Any) -> Any:
        self.num_plans += 1
        limits = self._limits(config)
        if plan.number < len(limits) and num_blocks <= limits[plan.number]:
            return planned(plan.number)
        raise OutOfMemory("it does not fit")


def found(stated: Stated, config: Config | None = None) -> list[tuple[str, str, int]]:
    """The depth by state."""
    sizes = largest(cast(Depths, stated), config or Config(), lambda _: None)
    return [(each.zero, each.offload, each.num_blocks) for each in sizes]


@pytest.mark.parametrize("limit", [2, 3, 17, 64, 99, 1000])
def test_the_deepest_is_within_one_part_in_25(limit: int) -> None:
    for strategies in ((limit,), (2, limit // 2, limit), (limit // 3, limit)):
        stated = Stated({("0", "none"): strategies, ("2", "none"): (2 * limit,)})
        for (zero, _, num_blocks), most in zip(found(stated), (limit, 2 * limit), strict=True):
            assert most - max(1, most // 25) <= num_blocks <= most, (zero, strategies)
        assert stated.num_plans < 120


def test_nothing_is_tried_beyond_the_bound() -> None:
    own = Config({"memory.zero": "0", "memory.offload": "none"})
    stated = Stated({("0", "none"): (50,)}, bound=50)
    assert found(stated, own)[0][2] >= 48 and stated.num_plans < 15
    assert found(Stated({("0", "none"): (10**9,)}), own)[0][2] >= MAX_BLOCKS - MAX_BLOCKS // 25
    assert found(Stated({("0", "none"): (2,)}, bound=2), own) == [("0", "none", 2)]


def test_states_that_settings_leave_open() -> None:
    assert open_states(Config()) == (("0", "none"), ("2", "none"), ("3", "none"), ("3", "optimizer"), ("3", "optimizer+parameters"))
    assert open_states(Config({"memory.zero": "2"})) == (("2", "none"), ("2", "optimizer"), ("2", "optimizer+parameters"))
    assert open_states(Config({"memory.offload": "none"})) == (("0", "none"), ("2", "none"), ("3", "none"))
    assert open_states(Config({"memory.zero": "0", "memory.offload": "optimizer"})) == (("0", "optimizer"),)


def test_nothing_that_fits_is_an_error() -> None:
    assert found(Stated({("3", "none"): (5,)})) == [("3", "none", 5)], "states that do not fit the model as it is are left out"
    with pytest.raises(PlanError, match="it does not fit"):
        found(Stated({}))


CLUSTER = "name: two\nhosts:\n  - {name: host, memory: 1 GiB, devices: [{model: cpu, memory: 14 MiB}, {model: cpu, memory: 10 MiB}]}"
SETTINGS = Config({"memory.fraction": 1.0, "memory.optimizer_states": 2, "planning.effort": 5})


@cache
def captured() -> ModelGraph:
    return GPT(layers=2, hidden=128, heads=2, sequence=16, vocabulary=64).graph()


@pytest.mark.parametrize("state", [("0", "none")], ids="-".join)
def test_it_is_as_deep_as_one_search_per_depth_says(state: tuple[str, str]) -> None:
    cluster, config = parse_cluster(CLUSTER), SETTINGS.with_values(dict(zip(("memory.zero", "memory.offload"), state, strict=True)))
    depths = Depths(lambda number: repeat_blocks(captured(), number), 2, cluster, 4)
    (size,) = largest(depths, config, lambda _: None)

    def fits(num_blocks: int) -> bool:
        try:
            decide(None, repeat_blocks(captured(), num_blocks), cluster, config, rows=4)
        except PlanError:
            return False
        return True

    step = size.step
    assert all(each.peak.total <= each.capacity for each in step.devices)
    assert size.num_blocks <= depths.most(config)
    assert fits(size.num_blocks), "a search finds it too"
    assert not fits(size.num_blocks + max(1, size.num_blocks // 25) + 1)


def test_a_plan_is_made_again_by_its_strategy() -> None:
    cluster = parse_cluster(CLUSTER)
    depths = Depths(lambda number: repeat_blocks(captured(), number), 2, cluster, 4)
    config = SETTINGS.with_values({"memory.zero": "0", "memory.offload": "none"})
    plan, step = depths.searched(4, config)
    other, again = depths.again(4, config, plan)
    assert strategy_of(plan, cluster) == strategy_of(other, cluster)
    assert replace(other, choices=()) == replace(plan, choices=()) and again.step_seconds == step.step_seconds
    with pytest.raises(PlanError, match="a strategy alone"):
        depths.again(4, config.with_values({"planning.search": "off"}), plan)
