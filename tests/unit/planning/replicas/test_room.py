"""How many rows can be held without recomputation: never fewer than a plan holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.graphs import chain, device
from whale.config import Config
from whale.errors import BatchError
from whale.estimate import Costs
from whale.estimate.memory.memory import state_bytes
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Host, Link
from whale.planning import MemoryShortage, make_plan
from whale.planning.pipeline.scheduling import shape_pipeline
from whale.planning.replicas.solve import most_rows
from whale.planning.verify.refused import Refused


def tight(memory: list[int]) -> Cluster:
    devices = tuple(device(f"h/{index}", "h", 1e9, size) for index, size in enumerate(memory))
    return Cluster("tight", (Host("h", devices, Link(1e10, 1e-6)),), None)


@pytest.mark.slow
@given(
    memory=st.lists(st.integers(2_000, 20_000), min_size=2, max_size=4),
    num_stages=st.integers(1, 2),
    num_micro_batch=st.integers(1, 8),
    num_rows=st.integers(1, 256),
)
def test_no_plan_without_recomputation_holds_more_rows(memory: list[int], num_stages: int, num_micro_batch: int, num_rows: int) -> None:
    graph, there = chain(6), tight(memory)
    config = Config({"pipeline.num_stages": num_stages, "pipeline.num_micro_batch": num_micro_batch})
    try:
        plan = make_plan(graph, there, config, rows=num_rows)
    except (MemoryShortage, BatchError):
        return
    prices, pipeline = Prices(graph, there, Costs()), shape_pipeline(config, None, num_stages)
    for replica in plan.replicas:
        placed = tuple(stage.virtual_device.devices for stage in replica.stages)
        assert replica.share <= most_rows(prices, pipeline, placed)


def test_where_the_estimate_finds_more_than_the_closed_form_the_plan_computes_more_again() -> None:
    graph, there = chain(6), tight([6_000, 6_000])
    config = Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4})
    with pytest.raises(Refused, match=r"h/0: the plan needs 5.50 KiB, 5.27 KiB usable: 232 B short"):
        make_plan(graph, there, config, rows=32)
    plan = make_plan(graph, there, config.with_values({"recompute.policy": "auto"}), rows=32)
    assert any(stage.recomputed for replica in plan.replicas for stage in replica.stages)


def test_the_bound_is_what_weights_and_optimizer_state_leave() -> None:
    prices, pipeline = Prices(chain(6), tight([20_000]), Costs()), shape_pipeline(Config({"pipeline.num_micro_batch": 4}), None, 1)
    states = [state_bytes(parameter, prices.state_of[parameter.name]) for parameter in prices.graph.parameters]
    held = sum(state.compute + state.optimizer for state in states)
    per_row = sum(prices.outputs[name].per_row for name in {name for names in prices.kept.values() for name in names})
    assert most_rows(prices, pipeline, (("h/0",),)) == 4 * int(1.01 * (prices.capacity("h/0") - held) / per_row)
    assert most_rows(Prices(chain(6), tight([1_000]), Costs()), pipeline, (("h/0",),)) == 0
