"""Where what the user set leaves no plan, the error names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.search.test_search import layers, made
from whale.config import Config
from whale.errors import ConfigError, WhaleError
from whale.planning import write_plan
from whale.planning.plan import EstimatedPlan
from whale.planning.realizing import Realizer
from whale.planning.strategy import Strategy
from whale.search import decide

GRAPH = layers([64] * 4)  # 64 KiB with gradients and optimizer state
TWO = made([[(1e9, 200_000)] * 2], network=1e9)


def hint_of(rows: int, settings: dict[str, object]) -> str:
    with pytest.raises(WhaleError) as caught:
        decide(None, GRAPH, TWO, Config(settings), rows=rows)
    return caught.value.hint or ""


def test_the_setting_without_which_there_is_a_plan_is_named() -> None:
    assert "without pipeline.num_micro_batch (64) there is a plan" in hint_of(8, {"pipeline.num_micro_batch": 64})
    assert "without planning.search (off) there is a plan" in hint_of(8, {"planning.search": "off"})
    assert "without recompute.policy ({0: full, 9: 0.3}) there is a plan" in hint_of(8, {"recompute.policy": {0: "full", 9: 0.3}})
    assert "without memory.fraction (0.1) there is a plan" in hint_of(8, {"memory.fraction": 0.1, "recompute.policy": "auto"})


def test_settings_that_are_not_to_blame_are_not_named() -> None:
    hint = hint_of(8, {"memory.fraction": 0.1, "pipeline.num_micro_batch": 64})
    assert "without" not in hint, "neither alone would do"


def test_a_plan_for_another_model_is_not_blamed_on_being_written_down(tmp_path: Path) -> None:
    plan, _ = decide(None, GRAPH, TWO, Config({"planning.effort": 2}), rows=8)
    (path := tmp_path / "plan.yaml").write_text(write_plan(plan, GRAPH))
    with pytest.raises(ConfigError, match="written for another model") as caught:
        decide(path, layers([64] * 5), TWO, Config(), rows=8)
    assert "without the replicas" not in (caught.value.hint or "")


def test_replicas_that_name_devices_that_are_not_there_say_that_alone() -> None:
    hint = hint_of(8, {"replicas": [{"devices": ["h0/0"]}, {"devices": ["h9/0"]}]})
    assert "h0/0" in hint and "without" not in hint


def test_what_names_the_setting_itself_is_not_said_twice() -> None:
    hint = hint_of(8, {"planning.search": "off", "planning.objective": "memory"})
    assert hint.startswith("remove it, or ")


def test_few_plans_are_made_to_find_the_setting_whatever_the_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    realized, seen, told = Realizer.realize, list[Strategy](), list[str]()

    def counted(self: Realizer, strategy: Strategy) -> EstimatedPlan:
        seen.append(strategy)
        return realized(self, strategy)

    monkeypatch.setattr(Realizer, "realize", counted)

    def num_plans(settings: dict[str, object]) -> int:
        seen.clear()
        with pytest.raises(WhaleError):
            decide(None, GRAPH, made([[(1e9, 200_000)] * 4], network=1e9), Config(settings), rows=16, tell=told.append)
        return len(seen)

    pin: dict[str, object] = {"pipeline.num_micro_batch": 64}
    assert num_plans(pin) == num_plans(pin | {"planning.effort": 500}) <= 8
    assert told, "a search for the setting tells what it sees"
