"""What a split stage holds in parts although no op of the training reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.planning.decoders import decoder
from tests.unit.planning.graphs import cluster, with_unread
from whale.axes import discover
from whale.config import Config, read_plan
from whale.ir.plan import BATCH, Shard
from whale.planning import make_plan, write_plan
from whale.planning.shard.write import with_unread as cut_unread
from whale.planning.simulation import even_shares

CUTS = (Shard(BATCH, (5, 3)), Shard("heads", (3, 1)), Shard("hidden", (40, 24)))


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((64,), "side:0 40:24"),  # activations of this length may lie in those parts
        ((7, 64), "side:1 40:24"),
        ((4, 64), "side:0 3:1"),
        ((8, 7), "side:0 5:3"),  # else in proportion to the longest cut
        ((2, 7), "side:0 1:1"),
        ((1, 7, 3), "side:1 4:3"),
        ((7,), ""),
        ((1, 7), ""),
        ((), ""),
    ],
)
def test_along_which_dimension_a_parameter_lies_that_only_outputs_read(shape: tuple[int, ...], cut: str) -> None:
    axes = discover(with_unread(decoder(2), side=shape))
    found = cut_unread(CUTS, ["side"], axes)
    assert found[:3] == CUTS and "".join(map(str, found[3:])) == cut
    assert cut_unread(CUTS[:1], ["side"], axes) == CUTS[:1], "rows alone are divided"


def test_plans_hold_parts_of_what_only_outputs_read(tmp_path: Path) -> None:
    graph, pair = with_unread(decoder(2), side=(40, 7)), cluster((3e9, 1e9))
    plan = make_plan(graph, pair, Config({"replicas": [{"split": 2}]}))
    (shard,) = (shard for shard in plan.replicas[0].stages[0].shards if shard.axis == "side:0")
    assert shard.sizes[0] > shard.sizes[1], "the faster device has more of each axis"
    (tmp_path / "plan.yaml").write_text(write_plan(plan, graph))
    assert make_plan(graph, pair, Config(read_plan(tmp_path / "plan.yaml"))).replicas == plan.replicas
    asked = Config({"replicas": [{"split": 2, "num_stages": 2, "axes": [plan.replicas[0].stages[0].shards[0].axis]}]})
    four = cluster((3e9, 1e9) * 2)
    assert even_shares(make_plan(graph, four, asked), graph, four, asked).reason == ""
