"""One rank on one GPU trains as the plain model there does, under every schedule and with random numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import whale
from tests.gpu.gpu import Gpu

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "recompute_early")


def _model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(64), nn.Linear(64, 8))


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input": torch.randn(12, 16, generator=generator), "label": torch.randint(8, (12,), generator=generator)}


def _loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["label"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_equals_the_plain_model(gpu: Gpu, schedule: str) -> None:
    plain, batch = _model().to(gpu.device), _batch()
    engine = whale.parallelize(
        _model(),
        loss=_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=batch,
        config={"pipeline.num_micro_batch": 3, "pipeline.schedule": schedule},
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    there = {name: value.to(gpu.device) for name, value in batch.items()}
    for _ in range(3):
        optimizer.zero_grad()
        loss = _loss(plain(there["input"]), there)
        loss.backward()
        optimizer.step()
        found = engine.step(batch)
        assert found.device.type == gpu.device.type
        assert float(found) == pytest.approx(loss.item(), rel=1e-5)
    state = engine.state_dict()
    assert state is not None and all(value.device.type == "cpu" for value in state.values())
    for name, value in gpu.on_host(plain.state_dict()).items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_dropout_is_equal_with_and_without_recomputation(gpu: Gpu) -> None:
    batch, gradients = _batch(), []
    for policy in ("none", "full"):
        engine = whale.parallelize(_model(dropout=0.3), loss=_loss, batch=batch, config={"recompute.policy": policy})
        engine.step(batch)
        gradients.append(gpu.on_host(engine.gradients()))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0)
