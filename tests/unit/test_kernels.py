"""A step on one rank computes no more than the plain loop (examples/benchmarks/kernels.py counts, and has published models)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

from kernels import DTYPES, Case, Counts, Pair, compare, count

Batch = dict[str, Tensor]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


def make_batch() -> Batch:
    return {"x": torch.randn(5, 6), "labels": torch.randint(3, (5,))}


def of_classes(scores: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(scores, batch["labels"])


def of_rows(scores: Tensor, batch: Batch) -> Tensor:
    return scores.square().sum(-1).mean()


def summed(scores: Tensor, batch: Batch) -> Tensor:
    return scores.square().sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", [of_classes, of_rows, summed])
def test_a_step_has_at_most_four_kernels_more(loss: object, dtype: str) -> None:
    pair = compare(Case(Classifier, make_batch, loss), dtype)
    assert pair.whale.num_kernels <= pair.plain.num_kernels + 4, pair.more
    assert pair.whale.kernels["_foreach_copy_"] <= 1 + (dtype != "float32"), (
        "what was in buffers is kept by one kernel, weights cast by one"
    )
    assert pair.whale.kernels["_foreach_norm"] == 0
    assert pair.whale.views["empty_like"] == 0


def test_views_are_no_kernels_and_what_is_repeated_counts_once() -> None:
    x, y = torch.zeros(4, 6), torch.zeros(6)
    found = count(lambda: (x.view(-1), torch.empty(9), x + y.expand(4, 6), y.add_(1)))
    assert found == Counts({"add": 1, "add_": 1}, {"view": 1, "empty": 1, "expand": 1}, 4 * (24 + 6 + 24) + 4 * 6)


def test_what_differs_is_named() -> None:
    one, other = count(lambda: torch.ones(3) + 1), count(lambda: torch.ones(3) * 2)
    assert Pair(one, other).more == {"add": 1, "mul": -1}
