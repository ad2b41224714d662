"""Bytes on the wire are the plan's, bridge by bridge, and the program has the bridges that the plan lists and no others."""

from __future__ import annotations

import pytest

from tests.distributed.bridges import compared
from tests.distributed.cutting import chosen_labels
from tests.distributed.world import World


@pytest.mark.parametrize(
    "builder", ["tests.hf_models:gpt2", "tests.hf_models:llama", "tests.hf_models:resnet", "tests.distributed.cutting_models:classes"]
)
def test_what_moves_is_what_the_plan_says(world: World, builder: str) -> None:
    found = 0
    for seed in range(3):
        num_parts = 2 + seed % 2
        shards = world.prepare(chosen_labels, builder, num_parts, seed)
        for num_bridges, received, differences in world.run(compared, builder, shards, num_ranks=num_parts):
            assert not differences, f"seed {seed}\n" + "\n".join(differences)
            found += num_bridges
            assert received or not num_bridges
    assert found > 20
