"""The figures of a simulation: read from the estimate, and above their bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.decoders import decoder
from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.errors import PlanError
from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.serialization import to_json
from whale.planning import Simulation, even_shares, simulation
from whale.planning.plan import plan_and_estimate
from whale.search import decide

MIXED = cluster((1e12, 5e11, 1e12, 2e11))


def simulate(**settings: object) -> Simulation:
    config = Config({key.replace("__", "."): value for key, value in settings.items()})
    return Simulation(*decide(None, chain(8, width=64), MIXED, config, rows=32))


def test_the_figures_are_those_of_the_estimate() -> None:
    found = simulate(pipeline__num_stages=2, pipeline__num_micro_batch=4)
    data = json.loads(json.dumps(found.as_data()))
    assert data["step_seconds"] == found.plan.step_seconds == found.step.step_seconds
    assert data["samples_per_second"] == pytest.approx(32 / found.plan.step_seconds)
    assert [device["name"] for device in data["devices"]] == list(found.plan.devices)
    for device in data["devices"]:
        assert 0 < device["busy"] <= 1 and device["compute"] == pytest.approx(device["busy"] * data["step_seconds"])
        assert 0 <= device["exposed_communication"] <= device["communication"] <= data["step_seconds"]
        assert sum(device["filled_with"].values()) == pytest.approx(device["peak_bytes"], abs=8)
        assert device["peak_bytes"] <= device["capacity_bytes"]


@at_most(25)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1", "recompute_early"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["none", "selective"]),
)
@example("interleaved", 3, 3, "none")  # chunks that do not take equally long
def test_no_step_is_shorter_than_its_bounds(schedule: str, stages: int, count: int, recompute: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    policy = "none" if schedule == "recompute_early" else recompute
    found = simulate(
        pipeline__num_stages=stages,
        pipeline__num_micro_batch=count,
        pipeline__schedule=schedule,
        pipeline__num_chunks=chunks,
        recompute__policy=policy,
    )
    near = found.bounds["schedule"]  # no bound
    assert near == pytest.approx(found.step.step_seconds, rel=0.4)
    assert all(bound <= found.step.step_seconds * (1 + 1e-9) for bound in found.bounds.values() if bound is not near), found.bounds
    assert found.bounds["evenly"] <= found.bounds["slowest"] * (1 + 1e-9)


def test_a_plan_that_was_made_before_is_simulated_as_it_is(tmp_path: Path) -> None:
    made = simulate(pipeline__num_stages=2)
    path = tmp_path / "plan.json"
    path.write_text(to_json(made.plan))
    again = Simulation(*decide(path, chain(8, width=64), MIXED, Config()))
    assert again.as_data() == made.as_data()
    with pytest.raises(PlanError, match="the plan was made for 32 rows, not 64"):
        decide(path, chain(8, width=64), MIXED, Config(), rows=64)


def test_equal_shares_are_slower_on_unlike_devices() -> None:
    config = Config({"replicas": [{"num_stages": 2, "num_micro_batch": 4}] * 2})
    graph = decoder(6, "fused")
    plan, step = decide(None, graph, MIXED, config, rows=64)
    even = even_shares(plan, graph, MIXED, config)
    found = Simulation(plan, step, even)
    assert even.step_seconds is not None and found.speedup is not None and found.speedup > 1.05 and even.reason == ""
    assert found.as_data()["even"] == {"step_seconds": even.step_seconds, "speedup": found.speedup, "reason": ""}


def test_equal_shares_on_equal_devices_cost_the_same() -> None:
    alike, config = cluster((1e12,) * 4), Config({"pipeline.num_micro_batch": 2})
    plan, step = plan_and_estimate(chain(8, width=64), alike, config, rows=32)
    assert even_shares(plan, chain(8, width=64), alike, config).step_seconds == pytest.approx(step.step_seconds)


def test_equal_shares_cut_the_axes_that_the_user_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Config]()

    def planned(graph: ModelGraph, cluster: Cluster, config: Config, *, rows: int | None) -> tuple[Plan, StepEstimate]:
        asked.append(config)
        return plan_and_estimate(graph, cluster, config, rows=rows)

    monkeypatch.setattr(simulation, "plan_and_estimate", planned)
    graph, devices = decoder(4, "fused"), cluster((1e12, 5e11, 1e12, 5e11))
    config = Config({"replicas": [{"split": 2, "num_stages": 2, "axes": ["up.weight:0"]}]})
    plan, _ = plan_and_estimate(graph, devices, config, rows=16)
    assert even_shares(plan, graph, devices, config).reason == ""
    (block,) = asked[0].replicas
    assert block.axes is not None and all("up.weight:0" in axis for axis in block.axes)


def test_equal_shares_may_not_fit() -> None:
    graph, config = chain(8, width=512), Config()
    plan, _ = plan_and_estimate(graph, cluster((1e12, 5e11)), config, rows=32)
    assert "out of memory" in even_shares(plan, graph, cluster((1e12, 5e11), memory=2**20), config).reason
