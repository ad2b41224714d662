"""Several ranks on one GPU, over Gloo with tensors of the device: the law, a step without host synchronisation, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests import reference
from tests.distributed.test_schedules import CHAIN
from tests.distributed.training import Case, largest_of, make_cluster, run_case, train_rank, train_reference
from tests.distributed.world import World
from tests.gpu.gpu import Gpu, gpu_or_stand_in, needs_memory
from tests.models import Description

TOLERANCE = 1e-10
TOKENS = Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four Gloo ranks; whale places them on the GPUs that there are."""
    with World(4, timeout=180.0) as ranks:
        yield ranks


def case(schedule: str, num_stages: int, **more: Any) -> Case:
    config = {"pipeline.schedule": schedule, "pipeline.num_stages": num_stages, "pipeline.num_micro_batch": 4}
    return Case(TOKENS, (16, 17), (1.0, 2.0, 1.0, 1.0), tuple({**config, **more}.items()))


def train_on_gpu(rank: int, num_ranks: int, case: Case) -> reference.Run:
    """Trains the case on one rank; its gradients are brought to the host."""
    with gpu_or_stand_in() as gpu:
        run = train_rank(rank, num_ranks, case)
        return replace(run, gradients=gpu.on_host(run.gradients))


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 1), ("1f1b", 4), ("zb_h1", 2), ("gpipe", 2)])
def test_the_law(world: World, schedule: str, num_stages: int) -> None:
    trained = case(schedule, num_stages)
    error, where = largest_of(run_case(world, train_on_gpu, trained), train_reference(trained))
    assert error < TOLERANCE, where


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch["label"])


def batch() -> dict[str, torch.Tensor]:
    return {"input": torch.randn(32, 64), "label": torch.randn(32, 64)}


def engine(num_ranks: int, **config: Any) -> whale.Engine:
    optimizer = partial(torch.optim.SGD, lr=0.1, foreach=True)
    return whale.parallelize(
        model(), loss=loss, optimizer=optimizer, batch=batch(), config=config, cluster=make_cluster((1.0,) * num_ranks)
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "recompute_early"])
def test_a_steady_step_never_waits_for_the_device(gpu: Gpu, schedule: str) -> None:
    """One rank: what Gloo copies to the host is not in the way."""
    trained = engine(1, **{"pipeline.num_micro_batch": 4, "pipeline.schedule": schedule, "gradient.clip_norm": 1.0})
    data = [batch() for _ in range(3)]
    trained.step(data[0])
    with gpu.never_waits():
        for example in data[1:]:
            trained.step(example)
    trained.close()


def peak_bytes(rank: int, num_ranks: int) -> tuple[int, int]:
    """Bytes at the peak of a steady step on this rank, and those of its parameters."""
    wide = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    example = {"input": torch.randn(4, 1024), "label": torch.randn(4, 1024)}
    cluster = make_cluster((1.0,) * num_ranks)
    trained = whale.parallelize(wide, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=example, cluster=cluster)
    trained.step(example)
    torch.cuda.reset_peak_memory_stats()
    trained.step(example)
    parameters = sum(value.numel() * value.element_size() for value in trained.parameters.values())
    peak = torch.cuda.max_memory_allocated()
    trained.close()
    return peak, parameters


@needs_memory
def test_gradients_are_kept_once(world: World) -> None:
    """Parameters, their gradients in buckets, and one weight's gradient on its way there: no second set of gradients."""
    for peak, parameters in world.run(peak_bytes, num_ranks=2):
        assert peak < 2.6 * parameters
