"""Stages that are alike but for names have one outline, and what is decided for one holds for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.graphs import chain, cluster, scope
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.part import NOTHING
from whale.estimate.prices.prices import Prices
from whale.planning.annotations.taskgraphs import assign_by_scopes, read_scopes
from whale.planning.pipeline.scheduling import PipelineShape, shape_pipeline
from whale.planning.shard.stage_price import StagePricing, make_scene
from whale.planning.shard.write import outline_of
from whale.planning.structure.stages import Assignment

NUM_STAGES = 4
KEEPING = (NOTHING,) * NUM_STAGES
CONFIG = Config({"pipeline.num_micro_batch": 4})


def split_chain(speeds: list[int]) -> tuple[Prices, PipelineShape, Assignment]:
    """Four stages of three layers, each split over two devices."""
    graph = chain(3 * NUM_STAGES, [(scope(layer // 3, 2, kind="split"),) for layer in range(3 * NUM_STAGES)], width=64)
    devices = cluster([speed * 1e9 for speed in speeds])
    annotations = read_scopes(graph, CONFIG, len(speeds))
    assert annotations is not None
    assignment = assign_by_scopes(graph, annotations)
    return Prices(graph, devices, Costs.of(CONFIG)), shape_pipeline(CONFIG, annotations, len(speeds)), assignment


def test_stages_in_the_middle_have_one_outline_and_those_at_the_ends_their_own() -> None:
    prices, pipeline, assignment = split_chain([1] * 8)
    scenes = (make_scene(prices, assignment, stage, pipeline) for stage in range(NUM_STAGES))
    first, second, third, last = (outline_of(scene, prices).signature for scene in scenes)
    assert second == third
    assert len({first, second, last}) == 3


@given(speeds=st.lists(st.integers(1, 2), min_size=8, max_size=8), rows=st.integers(1, 64))
@at_most(10)
def test_stages_priced_together_cost_what_each_costs_alone(speeds: list[int], rows: int) -> None:
    prices, pipeline, assignment = split_chain(speeds)
    placed = tuple((f"h0/{2 * stage}", f"h0/{2 * stage + 1}") for stage in range(NUM_STAGES))
    together = StagePricing.of(prices)
    for stage in range(NUM_STAGES):
        for own in (rows, rows + stage):  # the second is asked of this stage first
            found = together.price(pipeline, assignment, stage, placed, own, KEEPING)
            assert found == StagePricing.of(prices).price(pipeline, assignment, stage, placed, own, KEEPING)
            assert found.sharding is not None and found.sharding.shards


def test_devices_with_equal_parts_share_their_prices_whatever_the_others_of_their_groups_have() -> None:
    prices, pipeline, assignment = split_chain([1] * 8)
    ops = make_scene(prices, assignment, 1, pipeline).ops
    placed = tuple((f"h0/{2 * stage}", f"h0/{2 * stage + 1}") for stage in range(NUM_STAGES))
    sharding = StagePricing.of(prices).price(pipeline, assignment, 1, placed, 8, KEEPING).sharding
    assert sharding is not None and sharding.shards
    shards = tuple(replace(shard, sizes=(16, 16, 32)) for shard in sharding.shards)
    others = tuple(replace(shard, sizes=(24, 24, 16)) for shard in sharding.shards)
    assert prices.local(ops, shards, 0) is prices.local(ops, shards, 1) is prices.local(ops, others, 2)
    assert prices.local(ops, shards, 0) is not prices.local(ops, shards, 2)


def test_the_device_of_a_split_adds_the_gradients_of_its_parts_alone() -> None:
    prices, pipeline, assignment = split_chain([1] * 8)
    placed = tuple((f"h0/{2 * stage}", f"h0/{2 * stage + 1}") for stage in range(NUM_STAGES))
    priced = StagePricing.of(prices).price(pipeline, assignment, 1, placed, 8, KEEPING)
    ops, device = make_scene(prices, assignment, 1, pipeline).ops, prices.cluster.devices[0]
    local = prices.local(ops, priced.shards, 0)
    alone = Prices(local.graph, prices.cluster, prices.costs)
    vars(alone)["table"] = local.table
    index = np.array([local.table.position[name] for name in ops])
    assert local.seconds(device, 8).backward(index) == alone.seconds(device, 8).backward(index)
    assert local.seconds(device, 8).backward(index).line(8).at(8) < prices.seconds(device, 8).backward(index).line(8).at(8)
