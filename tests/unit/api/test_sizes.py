"""Captures for batches of other sizes are made once, kept up to a limit, and spoken of once."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import BatchError, PlanError


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).mean(1)
        return self.second(self.extra(hidden) if x.shape[1] > 9 else hidden)


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return (output.square() / 2 if batch.shape[1] == 8 else output.square()).mean()


def make_engine(num_sizes: int) -> whale.Engine:
    torch.manual_seed(0)
    config = {"runtime.num_sizes": num_sizes, "pipeline.num_micro_batch": 2}
    return whale.parallelize(Pooled(), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=torch.randn(4, 3, 4), config=config)


def test_one_capture_for_each_size_up_to_a_limit() -> None:
    engine = make_engine(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in (5, 6, 5, 7, 3):
            engine.step(torch.randn(4, length, 4))
    texts = [str(warning.message) for warning in said if "captured" in str(warning.message)]
    assert len(texts) == 2 and "captured anew for each" in texts[0] and "the least used are dropped" in texts[1]
    assert all("runtime.num_sizes: 2 are kept" in text for text in texts)
    plans = {length: engine.runtime.plan_of(f"train: batch is [rows, {length}, 4], the example's [rows, 3, 4]") for length in (5, 6, 7)}
    assert plans[6] is None and plans[5] is not None and plans[5].model != engine.plan.model
    assert plans[5].replicas == engine.plan.replicas


def test_other_ops_run_where_they_can() -> None:
    engine = make_engine(2)
    batch = torch.randn(4, 8, 4)
    model = Pooled()
    model.load_state_dict(engine.state_dict() or {})
    assert torch.isclose(engine.step(batch), loss(model(batch), batch).double())


def test_what_a_plan_cannot_be_carried_over_to() -> None:
    with pytest.raises(
        PlanError, match=r"trains the same parameters at all sizes of its batches \(not at all of them: extra.bias, extra.weight\)"
    ):
        make_engine(2).step(torch.randn(4, 10, 4))
    with pytest.raises(BatchError, match=r"batch is \[rows, 3, 5\], the example's \[rows, 3, 4\]\): the model cannot be captured"):
        make_engine(2).step(torch.randn(4, 3, 5))
    with pytest.raises(BatchError, match=r"batch has the example's dimensions \(\[rows, 3, 4\]; now \[4, 3\]\)"):
        make_engine(2).step(torch.randn(4, 3))
