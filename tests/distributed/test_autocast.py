"""Under data parallel, pipelines whose weight gradients wait and splits, a model trains as alone under the autocast in its code."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.captures import Captured, captured_once
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from tests.unit.capture.test_autocast import Layers, loss, make_batch

NAMES, REGIONS = ("convolution", "norm", "attention", "linear"), ("on", "none", "on", "off")
SGD = partial(torch.optim.SGD, lr=0.5)
PLANS: dict[str, dict[str, object]] = {
    "replicas": {"pipeline.num_stages": 1},
    "pipeline": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "pipeline.schedule": "zb_h1"},
    "split": {},
}


def built(plan: str) -> tuple[nn.Module, dict[str, Tensor], Any]:
    with whale.split(2) if plan == "split" else whale.replicate(1):
        inside = Layers(NAMES, REGIONS)
    return inside if plan == "split" else Layers(NAMES, REGIONS), make_batch(), loss


def captured(plan: str) -> Captured:
    return captured_once(built, plan)


def prepare(plan: str) -> None:
    captured(plan)


def train(rank: int, num_ranks: int, plan: str) -> tuple[list[float], dict[str, Tensor]]:
    made = captured(plan)
    cluster = make_cluster((1.0,) * num_ranks)
    engine = whale.parallelize(made.model, loss=loss, optimizer=SGD, batch=made.batch, config=PLANS[plan], cluster=cluster)
    losses = [float(engine.step(made.batch)) for _ in range(2)]
    state = engine.state_dict()
    engine.close()
    assert state is not None
    return losses, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_autocast_in_forward(world: World, plan: str) -> None:
    model, batch = Layers(NAMES, REGIONS), make_batch()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer, losses = SGD(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model(batch["x"]), batch)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    world.prepare(prepare, plan)
    for found, state in world.run(train, plan, num_ranks=2):
        assert found == pytest.approx(losses, rel=1e-2)
        for name, expected in model.named_parameters():
            moved = expected.detach() - start[name]
            torch.testing.assert_close(state[name] - start[name], moved, rtol=0, atol=5e-2 * float(moved.abs().max()))
