"""Plans whose axes take turns inside a stage run exactly: parts of the sequence between heads, columns and rows."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.captures import captured_once
from tests.distributed.world import World
from tests.unit.planning.transformers import Block, Transformer, loss
from whale.ir.cluster import Cluster, Device, Host, Link


def make_cluster(bandwidth: float, link: float) -> Cluster:
    """Two devices that compute for nothing, so that traffic and messages decide."""
    devices = tuple(Device(f"h/{index}", "h", "cpu", (("float32", 1e15), ("float64", 1e15)), 1 << 34, bandwidth) for index in range(2))
    return Cluster("test", (Host("h", devices, Link(link, 0.0)),), None)


def built() -> tuple[Transformer, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = Transformer(2, 16, 6, 23, 2, None).double()
    for block in model.blocks:
        assert isinstance(block, Block)
        block.dropout.p = 0.0
    ids = torch.randint(0, 23, (4, 6))
    return model, {"ids": ids, "labels": ids.roll(1, 1)}, loss


def prepare() -> None:
    captured_once(built).capture("eval")


def train(rank: int, size: int, bandwidth: float, link: float) -> tuple[float, int, int]:
    """The largest difference from the plain model; how many sums are scattered, and how many axes are cut."""
    made = captured_once(built)
    model, batch = copy.deepcopy(made.model), made.batch
    engine = whale.parallelize(
        made.model, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batch, cluster=make_cluster(bandwidth, link)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worst = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(batch["ids"]), batch)
        value.backward()
        worst = max(worst, abs(float(engine.step(batch)) - float(value.detach())))
        optimizer.step()
    state = engine.state_dict()
    assert state is not None
    worst = max(worst, *(float((state[name] - value).abs().max()) for name, value in nn.Module.state_dict(model).items()))
    worst = max(worst, abs(float(engine.evaluate(batch)) - float(loss(model(batch["ids"]), batch).detach())))
    shards = engine.plan.replicas[0].stages[0].shards
    engine.close()
    return worst, sum(len(shard.scattered) for shard in shards), len(shards)


@pytest.mark.parametrize(("bandwidth", "link"), [(1e6, 1e12), (1e9, 1e9)])
def test_axes_that_take_turns_train_as_the_plain_model(world: World, bandwidth: float, link: float) -> None:
    world.prepare(prepare)
    for worst, num_scattered, num_cuts in world.run(train, bandwidth, link, num_ranks=2):
        assert worst < 1e-12
        assert num_cuts > 2
        assert link < 1e10 or num_scattered > 0
