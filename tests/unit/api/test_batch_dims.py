"""Batches whose sizes leave open which tensors have rows: an error, or as the user states it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import BatchError

torch.set_num_threads(1)


class Nearest(nn.Module):
    """Distances of rows to the entries of a codebook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, codebook: Tensor, x: Tensor) -> Tensor:
        return (self.linear(x)[:, None] - codebook).square().sum(-1)


def make_batch(rows: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(rows)
    return {"codebook": torch.randn(16, 4, generator=random), "x": torch.randn(rows, 4, generator=random)}


def parallelize(**options: object) -> whale.Engine:
    return whale.parallelize(
        Nearest(),
        loss=lambda output, batch: output.amin(1).mean(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=make_batch(8),
        config={"pipeline.num_micro_batch": 2},
        **options,
    )


def test_open_sizes_are_refused() -> None:
    with pytest.raises(BatchError, match="batch_dims="):
        parallelize()
    with pytest.raises(BatchError, match="names 'book', which is not a tensor"):
        parallelize(batch_dims={"book": None})


def test_stated_sizes_train_evaluate_and_predict() -> None:
    engine, model = parallelize(batch_dims={"codebook": None, "x": 0}), Nearest()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (8, 6):
        optimizer.zero_grad()
        expected = model(**make_batch(rows)).amin(1).mean()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(float(engine.step(make_batch(rows))), float(expected), rtol=1e-5, atol=1e-6)
    expected = model(**make_batch(7))
    torch.testing.assert_close(engine.predict(make_batch(7)), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(float(engine.evaluate(make_batch(7))), float(expected.amin(1).mean()), rtol=1e-5, atol=1e-6)
    engine.close()
