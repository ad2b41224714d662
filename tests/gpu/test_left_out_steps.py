"""Steps that are not finite: left out by the device alone, as the host would, and told two steps later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from tests.gpu.gpu import Gpu, gpu_or_stand_in, ranks_on_gpu
from whale.runtime.runtime import Runtime

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-1, fused=True),
    "momentum": partial(torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
}
SLOPES = (1e4, 1.0, 1e4, 1e4, 1.0, 1.0)
"""Factors on the losses of six steps; gradients overflow at the large ones, the very first among them."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ranks_on_gpu(2) as ranks:
        yield ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batch(number: int, slope: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"input": torch.randn(8, 8, generator=generator), "slope": torch.full((8,), slope)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output.float().square().mean(-1) * batch["slope"]).mean()


def engine(optimizer: Any, num_ranks: int = 1, **config: Any) -> whale.Engine:
    return whale.parallelize(
        model(),
        loss=loss,
        optimizer=optimizer,
        batch=batch(0),
        config={"planning.search": "off", **config},
        cluster=make_cluster((1.0,) * num_ranks),
    )


def weights_of(trained: whale.Engine) -> dict[str, Tensor]:
    state = trained.state_dict()
    assert state is not None
    return {name: value.clone() for name, value in state.items()}


def train(rank: int, num_ranks: int, optimizer: str, on_device: bool, **config: Any) -> tuple[list[float], float | None, dict[str, Tensor]]:
    """Losses, the loss scale and the weights after steps in float16, of which the device leaves out some, or the host."""
    with gpu_or_stand_in() if on_device or torch.cuda.is_available() else nullcontext():  # a CPU's host knows at once
        trained = engine(OPTIMIZERS[optimizer], num_ranks, **{"precision.dtype": "fp16", **config})
        with mock.patch.object(Runtime, "masks_steps", Runtime.masks_steps if on_device else lambda *_: False):
            assert trained.runtime.masks_steps(trained.state) is on_device
            losses = [trained.step(batch(number, slope)) for number, slope in enumerate(SLOPES)]
            found = [float(each) for each in losses], trained.loss_scale, weights_of(trained)
        assert not trained.was_skipped
        trained.close()
        return found


@pytest.mark.parametrize("config", [{}, {"gradient.clip_norm": 0.1}, {"pipeline.num_micro_batch": 2}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_device_leaves_out_what_the_host_would(optimizer: str, config: dict[str, Any]) -> None:
    (losses, scale, weights), (expected, its_scale, its_weights) = (train(0, 1, optimizer, each, **config) for each in (True, False))
    assert losses == expected
    assert scale == its_scale == 2.0**13
    for name, value in its_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_all_ranks_leave_out_the_same(world: World) -> None:
    """Gradients of both ranks overflow: what says so is a 1 all the same."""
    _, scale, weights = train(0, 1, "adamw", False)
    for found in world.run(train, "adamw", True, num_ranks=2):
        assert found[1] == scale
        for name, value in weights.items():
            assert found[2][name].isfinite().all()
            if "running" not in name:
                torch.testing.assert_close(found[2][name], value, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_that_is_no_number_never_reaches_the_weights(gpu: Gpu, optimizer: str, dtype: str) -> None:
    trained = engine(OPTIMIZERS[optimizer], **{"precision.dtype": dtype})
    trained.step(batch(0))
    before = weights_of(trained)
    with gpu.never_waits():
        trained.step(batch(1, torch.nan))
        trained.step(batch(2))
    with pytest.raises(whale.RuntimeFault, match="the loss is nan at step 2 on rank 0; this update and those since were not applied"):
        trained.step(batch(3))
    after = weights_of(trained)
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "buffers too"
    trained.step(batch(4))
    assert not torch.equal(weights_of(trained)["0.weight"], before["0.weight"])
    trained.close()


def test_what_is_not_finite_at_the_least_scale_is_told_in_the_end(gpu: Gpu) -> None:
    trained = engine(OPTIMIZERS["adamw"], **{"precision.dtype": "fp16"})
    before = weights_of(trained)
    with pytest.raises(whale.RuntimeFault, match="not finite at step 17 with a loss scale of 1: loss inf"):
        for number in range(20):
            trained.step(batch(number, torch.inf))
    after = weights_of(trained)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    trained.close()


def test_a_loss_of_one_of_several_batches_is_told_of_the_update_too(gpu: Gpu) -> None:
    trained = engine(OPTIMIZERS["adamw"])
    before = weights_of(trained)
    with pytest.raises(whale.RuntimeFault, match="the loss is nan at step 1"):
        for number, slope in enumerate((torch.nan, 1.0, 1.0)):
            trained.forward_backward(batch(number, slope))
    trained.update()
    trained.step(batch(4))
    with pytest.raises(whale.RuntimeFault, match=r"the loss is nan at step 1 .* not applied"):
        trained.step(batch(5))
    assert all(
        torch.equal(value, weights_of(trained)[name]) for name, value in before.items() if "running" not in name and "num" not in name
    )
    trained.step(batch(6))
    assert not torch.equal(weights_of(trained)["0.weight"], before["0.weight"])
    trained.close()


def test_a_scale_that_never_changes_ends_in_an_error(gpu: Gpu) -> None:
    settings = {"precision.dtype": "fp16", "precision.loss_scale": 128, "precision.loss_scale_growth_steps": None}
    trained = engine(OPTIMIZERS["adamw"], **settings)
    with pytest.raises(whale.RuntimeFault, match="not finite at step 20 with a loss scale of 128"):
        for number in range(24):
            trained.step(batch(number, torch.inf))
            assert trained.loss_scale == 128, "who asks changes nothing"
    trained.close()
