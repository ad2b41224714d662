"""An axis whose size follows the number of rows is cut nowhere, whatever the example's number is: the next batch has another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.distributed.training import make_cluster
from whale.axes import discover
from whale.capture import capture
from whale.config import Config
from whale.ir.plan import BATCH
from whale.search import decide


class Placed(nn.Module):
    """Writes each row's largest value to its place; which rows are written is told by numbers, not by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        places = torch.arange(h.shape[0]), h.argmax(1)
        found: Tensor = self.last(torch.zeros_like(h).index_put(places, h.amax(1), accumulate=True) + h)
        return found


def test_places_of_rows_are_not_cut() -> None:
    graph, _ = capture(Placed(), torch.zeros(8, 6), lambda output, batch: output.square().mean())
    axes = discover(graph)
    assert axes.of_rows > {BATCH}
    settings = Config({"replicas": [{"split": 2}]})
    plan, *_ = decide(None, graph, make_cluster((1e-4, 1e-4)), settings)
    cut = {shard.axis for stage in plan.replicas[0].stages for shard in stage.shards}
    assert cut and not cut & axes.of_rows
