"""Weights that are brought where ops read them, after a pass that was given up half way."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import WhaleError


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def test_after_an_error_weights_are_brought_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
    good = {"input": torch.randint(8, (6,)), "target": torch.randn(6, 1)}
    bad = good | {"input": torch.full((6,), 9)}
    losses = []
    for fails in (False, True):
        engine = whale.parallelize(
            model,
            loss=loss,
            batch=good,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            config={"memory.offload": "optimizer+parameters", "communication.bucket_bytes": 64},
        )
        engine.average(0.5)
        own = [float(engine.step(good)) for _ in range(2)]
        if fails:
            for call in (partial(engine.evaluate, averaged=True), engine.step):
                with pytest.raises(WhaleError):
                    call(bad)
        own += [float(engine.step(good)), float(engine.evaluate(good, averaged=True)), float(engine.step(good))]
        losses.append(own)
        engine.close()
    assert losses[0] == losses[1] and len(set(losses[0])) == 5
