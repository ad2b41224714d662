"""Several ranks on one GPU, over Gloo with tensors of the device: the law, a step without host synchronisation, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests import reference
from tests.distributed.test_schedules import CHAIN
from tests.distributed.training import Case, largest_of, make_cluster, run_case, train_rank, train_reference
from tests.distributed.world import World
from tests.gpu.gpu import Gpu, gpu_or_stand_in, needs_memory, needs_streams, ranks_on_gpu
from tests.models import Description

TOLERANCE = 1e-10
TOKENS = Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four Gloo ranks; whale places them on the GPUs that there are."""
    with ranks_on_gpu(4) as ranks:
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


def engine(num_ranks: int, kernels: str = "foreach", scheduler: Any = None, **config: Any) -> whale.Engine:
    optimizer = partial(torch.optim.AdamW, lr=0.1, **{kernels: True})
    return whale.parallelize(
        model(),
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=batch(),
        config=config,
        cluster=make_cluster((1.0,) * num_ranks),
    )


SETTINGS = [
    *({"pipeline.schedule": schedule} for schedule in ("gpipe", "1f1b", "zb_h1", "recompute_early")),
    {"precision.dtype": "bf16"},
    {"gradient.clip_norm": None},
    pytest.param({"memory.offload": "activations"}, marks=needs_streams),
]


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_a_steady_step_never_waits_for_the_device(gpu: Gpu, config: dict[str, Any]) -> None:
    """One rank: what Gloo copies to the host is not in the way."""
    check_never_waits(gpu, engine(1, **{"pipeline.num_micro_batch": 4, "gradient.clip_norm": 1.0, **config}))


@pytest.mark.parametrize("scheduler", [None, partial(torch.optim.lr_scheduler.StepLR, step_size=1)], ids=["", "scheduler"])
@pytest.mark.parametrize("config", [{}, {"gradient.clip_norm": 1.0}, {"pipeline.num_micro_batch": 4}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp16"])
def test_a_fused_optimizer_leaves_out_steps_without_a_wait(gpu: Gpu, dtype: str, config: dict[str, Any], scheduler: Any) -> None:
    check_never_waits(gpu, engine(1, "fused", scheduler, **{"precision.dtype": dtype, **config}))


def check_never_waits(gpu: Gpu, trained: whale.Engine) -> None:
    data = [batch() for _ in range(5)]
    trained.step(data[0])
    with gpu.never_waits():
        for example in data[1:]:
            trained.step(example)
    trained.close()


PRECISIONS = {"float32": (None, 1e-5), "bf16": (torch.bfloat16, 2e-2), "fp16": (torch.float16, 5e-3)}
"""By `precision.dtype`: the type of torch's autocast, and how far losses and weights may be from it, relative to the largest."""

PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "replicas": {},
    "1f1b": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4},
    "1f1b, received late": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4, "pipeline.receive_early": False},
    "zb_h1": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4, "pipeline.schedule": "zb_h1"},
    "split": {},
    **{f"zero {level}": {"memory.zero": str(level), "communication.bucket_bytes": 4096} for level in (1, 2, 3)},
    **{
        f"offload {kind}": {"memory.offload": kind, "communication.bucket_bytes": 4096}
        for kind in ("optimizer", "optimizer+parameters", "activations")
    },
    "zero 3 and offload": {"memory.zero": "3", "memory.offload": "optimizer", "communication.bucket_bytes": 4096},
}


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def numbered(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(32, 64, generator=generator) for name in ("input", "label")}


def train_by_whale(rank: int, num_ranks: int, dtype: str, plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps, and the weights behind them."""
    with gpu_or_stand_in():
        config = {"precision.dtype": dtype, "planning.search": "off", "memory.optimizer_states": 1, **PLANS[plan]}
        with whale.split(num_ranks) if plan == "split" else nullcontext():
            made = model()
        trained = whale.parallelize(
            made, loss=loss, optimizer=SGD, batch=numbered(0), config=config, cluster=make_cluster((1.0,) * num_ranks)
        )
        losses = [float(trained.step(numbered(number))) for number in range(3)]
        state = trained.state_dict()
        assert state is not None
        trained.close()
        return losses, state


def train_by_torch(dtype: str, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """The same in a plain loop."""
    plain, losses = model().to(device), []
    optimizer, half = SGD(plain.parameters()), PRECISIONS[dtype][0]
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
    for number in range(3):
        data = {name: value.to(device) for name, value in numbered(number).items()}
        optimizer.zero_grad()
        with torch.autocast(device.type, half) if half is not None else nullcontext():
            found = loss(plain(data["input"]), data)
        scaler.scale(found).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(found.item())
    return losses, {name: value.cpu() for name, value in plain.state_dict().items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_the_law_by_precision(world: World, dtype: str, plan: str) -> None:
    if dtype != "float32" and plan not in ("one device", "replicas") and not torch.cuda.is_available():
        pytest.skip("the stand-in device casts as the CPU does, where tests/distributed/test_precision.py has all plans")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_ranks = {"one device": 1, "split": 2}.get(plan, 4 if "pipeline.num_stages" in PLANS[plan] else 2)
    losses, state = train_by_torch(dtype, device)
    tolerance = PRECISIONS[dtype][1]
    for found, weights in world.run(train_by_whale, dtype, plan, num_ranks=num_ranks):
        assert found == pytest.approx(losses, rel=tolerance)
        for name, value in state.items():
            torch.testing.assert_close(
                weights[name],
                value,
                rtol=tolerance,
                atol=tolerance * float(value.abs().max()),
                msg=lambda text, name=name: f"{name}: {text}",
            )


def peak_bytes(rank: int, num_ranks: int) -> tuple[int, int]:
    """Bytes at the peak of a steady step on this rank, and those of its parameters."""
    wide = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))  # so large that the 32 MiB of cuBLAS count little
    example = {"input": torch.randn(4, 2048), "label": torch.randn(4, 2048)}
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
