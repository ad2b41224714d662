"""Evaluation and prediction of batches with fewer rows than replicas: those without rows have no part in it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import BatchError

Batch = dict[str, Tensor]

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (3, {"pipeline.num_micro_batch": 2, "planning.search": "off"}),
    "pipelines": (4, {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "planning.search": "off"}),
    "sharded state": (3, {"memory.zero": 2, "planning.search": "off"}),
    "a split": (3, {"replicas": [{"split": 2, "rows": 3}, {"devices": 1, "rows": 1}], "planning.search": "off"}),
    "sharded weights": (2, {"memory.zero": 3, "planning.search": "off"}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch_of(num_rows: int) -> Batch:
    generator = torch.Generator().manual_seed(num_rows)
    return {"input": torch.randn(num_rows, 4, generator=generator), "target": torch.randint(3, (num_rows, 1), generator=generator).float()}


def loss(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    """A mean weighted by the batch, and a metric that is a plain sum."""
    weights = 1 + batch["target"]
    return {"loss": ((output - batch["target"]).square() * weights).sum() / weights.sum(), "total": output.sum()}


def evaluate(rank: int, num_ranks: int, config: dict[str, Any]) -> list[Any]:
    engine = whale.parallelize(
        model(), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.0), batch=batch_of(8), config=config,
        cluster=make_cluster((1.0,) * num_ranks),
    )  # fmt: skip
    found: list[Any] = []
    for num_rows in (5, 1, 2, 1):
        batch = batch_of(num_rows)
        value, output = engine.evaluate(batch, outputs=True)
        own, rows = engine.predict(batch, gather=False)
        found.append(
            (float(engine.evaluate(batch)), float(value), float(engine.metrics["total"]), output, engine.predict(batch), own, rows)
        )
    found.append(float(engine.step(batch_of(8))))
    engine.close()
    return found


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "sharded weights"])
def test_few_rows_are_those_of_the_first_replicas(world: World, name: str) -> None:
    num_ranks, config = CONFIGS[name]
    on_ranks = world.run(evaluate, config, num_ranks=num_ranks)
    for index, num_rows in enumerate((5, 1, 2, 1)):
        batch = batch_of(num_rows)
        output = model()(batch["input"]).detach()
        expected = {key: float(value) for key, value in loss(output, batch).items()}
        for found in on_ranks:
            first, second, total, both, predicted, own, rows = found[index]
            assert first == pytest.approx(expected["loss"], rel=1e-5) and second == first
            assert total == pytest.approx(expected["total"], rel=1e-5, abs=1e-6)
            torch.testing.assert_close(both, output)
            torch.testing.assert_close(predicted, output)
            torch.testing.assert_close(own, output[rows])
        assert sorted(row for found in on_ranks for row in found[index][6].tolist()) == list(range(num_rows))
    whole = float(loss(model()(batch_of(8)["input"]), batch_of(8))["loss"].detach())
    assert [found[-1] for found in on_ranks] == pytest.approx([whole] * num_ranks, rel=1e-5)


def refuse(rank: int, num_ranks: int) -> list[str]:
    engine = whale.parallelize(
        model(), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.0), batch=batch_of(8), config=CONFIGS["sharded weights"][1]
    )
    said = []
    for call in (engine.evaluate, engine.predict, engine.step):
        with pytest.raises(BatchError) as caught:
            call(batch_of(1))
        said.append(str(caught.value))
        engine.evaluate(batch_of(8))
    engine.close()
    return said


def test_replicas_that_gather_weights_together_all_need_rows(world: World) -> None:
    for said in world.run(refuse, num_ranks=2):
        assert all(
            "the batch has 1 row, fewer than the plan needs: one for each of 2 replicas of 1 micro-batch each" in text for text in said
        )
