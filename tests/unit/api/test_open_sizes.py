"""Batches whose sizes leave open where their rows are: whatever is guessed, numbers are those of the plain loop, or something is said."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from tests.examples import at_most
from whale.errors import WhaleError

torch.set_num_threads(1)

Batch = dict[str, Tensor]
CLASSES = 3


class Nearest(nn.Module):
    """How far rows are from the next entry of a codebook, whose size says nothing of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return (self.linear(x)[:, None] - other).square().sum(-1).amin(1)


class Scaled(Nearest):
    """A factor for each feature, or for each row: their number says which, and broadcasting does either."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return (self.linear(x) * other[: 4 if len(other) >= 4 else 1, 0]).sum(1)


class Sequence(Nearest):
    """Rows are dimension 1, behind steps in time."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.linear(other).cumsum(0)[-1].tanh().sum(1)


class Bags(Nearest):
    """Bags of numbers, of which the batch says where each begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        values = other[:, 0].abs().mul(3).long().clamp(max=7)
        return self.linear(self.table(values, torch.zeros_like(x[:, 0]).long()) + x).sum(1)


def loss(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["target"])


def weighted(output: Tensor, batch: Batch) -> Tensor:
    """The weights of classes stand in the batch."""
    return F.cross_entropy(output[:, None] * torch.arange(CLASSES), batch["label"], batch["weights"])


def make_batch(kind: type[nn.Module], rows: int, size: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    shape = (size, rows, 4) if kind is Sequence else (size, 4)
    return {
        "x": torch.randn(rows, 4, generator=random),
        "other": torch.randn(shape, generator=random),
        "target": torch.randn(rows, generator=random),
        "label": torch.randint(0, CLASSES, (rows,), generator=random),
        "weights": torch.rand(CLASSES, generator=random) + 0.5,
    }


def plain(model: nn.Module, criterion: Any, batches: list[Batch]) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        value = criterion(model(batch["x"], batch["other"]), batch)
        value.backward()
        optimizer.step()
        found.append(float(value))
    return found


@pytest.mark.slow
@given(
    kind=st.sampled_from([Nearest, Scaled, Sequence, Bags]),
    criterion=st.sampled_from([loss, weighted]),
    rows=st.sampled_from([2, 3, 4, 6]),
    size=st.integers(1, 6),
    later=st.integers(2, 7),
    states=st.booleans(),
)
@at_most(12)
def test_silent_is_exact(kind: type[Nearest], criterion: Any, rows: int, size: int, later: int, states: bool) -> None:
    batches = [make_batch(kind, number, size, seed) for seed, number in enumerate((rows, rows, later))]
    torch.manual_seed(0)
    expected = plain(kind(), criterion, batches)
    torch.manual_seed(0)
    stated = {"x": 0, "other": None, "target": 0, "label": 0, "weights": None} if states else None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            engine = whale.parallelize(
                kind(),
                loss=criterion,
                optimizer=partial(torch.optim.SGD, lr=0.1),
                batch=batches[0],
                batch_dims=stated,
                config={"pipeline.num_micro_batch": 2},
            )
            found = [float(engine.step(batch)) for batch in batches]
        except WhaleError:
            return
    if not any("batch" in str(each.message) for each in told):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    engine.close()
