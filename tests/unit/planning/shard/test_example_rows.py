"""A plan follows from the rows that are planned for: the example batch may have any number of rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.mixing import LOSSES, Layers, make_batch
from tests.unit.planning.graphs import cluster
from whale.capture import capture
from whale.config import Config
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH
from whale.planning.plan import plan_and_estimate

sys.path.append(str(Path(__file__).parents[4] / "examples"))

import moe

EXAMPLES = (2, 4, 64)  # of fewer rows a capture is not for any number
ROWS = 96


class Classifier(nn.Module):
    """Classes that are divided over devices: per row, the loss exchanges a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        with whale.replicate(2):
            self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        with whale.split(2):
            self.head = nn.Linear(8, 4096)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def classifier(rows: int) -> ModelGraph:
    batch = {"x": torch.zeros(rows, 8), "y": torch.zeros(rows, dtype=torch.int64)}
    return capture(Classifier(), batch, lambda logits, batch: F.cross_entropy(logits, batch["y"]))[0]


GRAPHS = {
    "experts": lambda rows: capture(*moe.build(layers=1, width=16, context=8, rows=rows))[0],
    "classes": classifier,
    "joined rows": lambda rows: capture(Layers("batch norm"), make_batch(rows), LOSSES["mean"])[0],
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_plans_are_equal_whatever_the_rows_of_the_example(kind: str) -> None:
    there, config = cluster((4e9, 4e9, 1e9, 1e9), (1e9, 1e9, 1e9, 1e9)), Config({"pipeline.num_micro_batch": 1})
    plans, steps = zip(*(plan_and_estimate(GRAPHS[kind](rows), there, config, rows=ROWS) for rows in EXAMPLES), strict=True)
    assert any(shard.axis == BATCH for stage in plans[0].replicas[0].stages for shard in stage.shards) == (kind != "classes")
    assert len({replace(plan, model="") for plan in plans}) == 1  # but for the fingerprint of the capture
    assert len({step.step_seconds for step in steps}) == 1 and len({step.devices for step in steps}) == 1
