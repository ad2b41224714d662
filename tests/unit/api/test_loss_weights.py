"""The law of the loss where its divisor follows from the rows: batches of another size, in pieces, are exact, warned of or refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import CaptureError

Loss = Callable[[Tensor, Mapping[str, Tensor]], Any]

EXACT: dict[str, Loss] = {
    "a number": lambda o, b: (o.square().sum(), o.shape[0] + 1),
    "all but one": lambda o, b: o.square().sum() / (o.shape[0] - 1),
    "fixed rows": lambda o, b: (o.square().sum(), len(o)),
    "fixed rows in a tensor": lambda o, b: (o.square().sum(), torch.tensor(float(len(o)))),
    "fixed rows in a tensor below": lambda o, b: o.square().sum() / torch.tensor(float(len(o))),
}
TOLD: dict[str, Loss] = {
    "fixed, all but one": lambda o, b: o.square().sum() / (len(o) - 1),
    "fixed, sums over all but one": lambda o, b: o.square().sum(0).div(len(o) - 1).sum(),
    "fixed, root": lambda o, b: o.square().sum() / math.sqrt(len(o)),
    "fixed, root inside": lambda o, b: (o.square() / math.sqrt(len(o))).sum(),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def rows(num: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(num))}


def errors(loss: Loss, num_micro_batch: int) -> tuple[list[float], str]:
    """How far the losses of two batches are off, and what was warned of."""
    torch.manual_seed(0)
    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = whale.parallelize(model, loss=loss, batch=rows(4), config={"pipeline.num_micro_batch": num_micro_batch})
        found = []
        for batch in (rows(4), rows(6)):
            expected = loss(model(batch["x"]), batch)
            expected = expected[0] / expected[1] if isinstance(expected, tuple) else expected
            found.append(abs(float(engine.evaluate(batch)) - float(expected)))
        engine.close()
    return found, " ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("name", EXACT)
def test_divisors_that_are_known_for_any_rows(name: str) -> None:
    found, told = errors(EXACT[name], 2)
    assert max(found) < 1e-12 and "needed whole" not in told


@pytest.mark.parametrize("name", TOLD)
def test_divisors_known_for_one_number_of_rows(name: str) -> None:
    assert max(errors(TOLD[name], 1)[0]) < 1e-12, "captured anew for each number of rows"
    assert "the batch is needed whole here" in errors(TOLD[name], 2)[1]


def test_a_tensor_made_for_one_number_of_rows_is_refused_at_another() -> None:
    with pytest.raises(CaptureError, match=r"the constant tensor .* that the model's code makes differs for"):
        errors(lambda o, b: o.square().sum() * torch.tensor(float(len(o)) ** -0.5), 1)
