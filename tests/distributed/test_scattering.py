"""Tensors that cross from one split stage to the next in parts, over a slow link, and are gathered on the fast one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import whale
from tests.distributed.test_split import captured_case, difference, loss_fn, prepare
from tests.distributed.world import World
from whale.hardware.cluster_file import parse_cluster

TWO_HOSTS = """
name: two-hosts
hosts:
  - {name: a, devices: [V100-32GB, V100-32GB], link: {bandwidth: 300 GB/s, latency: 1 us}}
  - {name: b, devices: [%s], link: {bandwidth: 300 GB/s, latency: 1 us}}
network: {bandwidth: 1 Mbit/s, latency: 1 us}
"""


def case_of(num_ranks: int) -> str:
    return "both stages" if num_ranks == 4 else "unlike groups"


def train(rank: int, size: int, second: str, schedule: str) -> tuple[float, list[str]]:
    """The largest difference from the plain model, and which tensors cross in parts to a second stage on `size` - 2 devices."""
    made = captured_case(case_of(size))
    model, batch = made.model, made.batch
    engine = whale.parallelize(
        model,
        loss=loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        batch=batch,
        config={"pipeline.num_micro_batch": 2, "gradient.clip_norm": 0.5, "pipeline.schedule": schedule},
        cluster=parse_cluster(TWO_HOSTS % ", ".join([second] * (size - 2)), "hosts.yaml"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    worst = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model(batch["ids"]), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        worst = max(worst, abs(float(engine.step(batch)) - float(loss)))
        optimizer.step()
    worst = max(worst, difference(engine, model, batch))
    crossing = [name for shard in engine.plan.replicas[0].stages[1].shards for name in shard.arriving]
    engine.close()
    return worst, crossing


@pytest.mark.parametrize(("second", "schedule"), [("V100-32GB", "1f1b"), ("T4", "1f1b"), ("V100-32GB", "zb_h1")])
def test_a_model_whose_tensors_cross_in_parts_trains_as_the_plain_one(world: World, second: str, schedule: str) -> None:
    world.prepare(prepare, case_of(4))
    for worst, crossing in world.run(train, second, schedule, num_ranks=4):
        assert worst < 1e-12
        assert len(crossing) == 1


def test_groups_of_unlike_sizes_exchange_parts_exactly(world: World) -> None:
    world.prepare(prepare, case_of(5))
    for worst, crossing in world.run(train, "V100-32GB", "1f1b", num_ranks=5):  # groups of two and of three
        assert worst < 1e-12
        assert len(crossing) == 1
