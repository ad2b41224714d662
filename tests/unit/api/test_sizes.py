"""Captures for batches of other sizes are made once, kept up to a limit, and spoken of once."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import BatchError, CaptureError


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
    texts = [str(warning.message) for warning in said if "runtime.num_sizes" in str(warning.message)]
    assert len(texts) == 2 and "captured for each" in texts[0] and "the least used batches and values are dropped" in texts[1]
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


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, gate: Tensor | None = None, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        hidden = self.first(x) if gate is None else self.first(x) * self.second(gate)
        return (hidden,) if labels is None else ((hidden - labels).square().mean(), hidden)


@pytest.mark.parametrize("first", ["x", "x labels", "x gate labels"])
def test_batches_of_any_parts_that_the_model_takes_are_predicted(first: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 4)
    batch = {"x": rows, "gate": rows.cos(), "labels": rows[:, :3].sin()}
    model = Optional()
    engine = whale.parallelize(model, loss=lambda output, batch: output[0], batch=batch)
    plain = Optional()
    plain.load_state_dict(engine.state_dict() or {})
    for names in (first, "x", "x labels", "x gate labels", "x gate", "x"):
        for given in (batch, {name: value[:1] for name, value in batch.items()}):
            part = {name: given[name] for name in names.split()}
            for found, expected in zip(engine.predict(part), plain(**part), strict=True):
                torch.testing.assert_close(found, expected.detach(), check_dtype=False)
    torch.testing.assert_close(engine.predict(rows)[0], plain(rows)[0].detach())
    assert torch.isclose(engine.evaluate({"x": rows, "labels": batch["labels"]}), plain(rows, None, batch["labels"])[0].double())
    with pytest.raises(BatchError, match=r"missing: batch\['labels'\]"):
        engine.step({"x": rows, "gate": rows.cos()})
    with pytest.raises(BatchError, match=r"lacks|requires|needs"):
        engine.predict({"gate": rows})


def test_parts_that_the_loss_misses_are_named() -> None:
    batch = {"input": torch.randn(4, 4), "y": torch.randn(4, 3)}
    engine = whale.parallelize(nn.Linear(4, 3), loss=lambda output, batch: (output - batch["y"]).square().mean(), batch=batch)
    for _ in range(2):  # as the first batch of its kind, and as another
        with pytest.raises((BatchError, CaptureError), match=r"cannot be captured for a batch without batch\['y'\]: .*KeyError"):
            engine.evaluate({"input": batch["input"]})
        engine.evaluate(batch)


def test_what_a_plan_cannot_be_carried_over_to() -> None:
    with pytest.raises(BatchError, match=r"batch is \[rows, 3, 5\], the example's \[rows, 3, 4\]\): the model cannot be captured"):
        make_engine(2).step(torch.randn(4, 3, 5))
    with pytest.raises(BatchError, match=r"batch has dimensions \[4, 3\], not the example's \[rows, 3, 4\]"):
        make_engine(2).step(torch.randn(4, 3))


def of_task(output: Tensor, batch: dict[str, Any]) -> Tensor:
    error = output - batch["y"]
    return batch["weight"] * (error.square() if batch["task"] == "squares" else error.abs()).mean()


@pytest.mark.parametrize("num_micro_batch", [1, 2])
def test_constants_of_the_batch_may_change(num_micro_batch: int) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()
    batches = [{"input": x, "y": y, "task": task, "weight": weight} for task, weight in CONSTANTS]
    optimizer, config = torch.optim.SGD(plain.parameters(), lr=0.1), {"pipeline.num_micro_batch": num_micro_batch}
    engine = whale.parallelize(model, loss=of_task, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batches[0], config=config)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in batches:
            optimizer.zero_grad()
            expected = of_task(plain(x), batch)
            expected.backward()
            optimizer.step()
            assert float(engine.step(batch)) == pytest.approx(expected.item(), rel=1e-12)
    assert sum("captured for each" in str(each.message) for each in told) == 1
    assert engine.runtime.plan_of("train: batch['task'] is 'norms', the example's 'squares'") is not None
    with pytest.raises(BatchError, match=r"batch\['task'\] is 3, the constant 'squares' in the example"):
        engine.step({**batches[0], "task": 3})
    engine.close()


CONSTANTS = (("squares", 1.0), ("norms", 1.0), ("squares", 1.0), ("norms", 0.5), ("norms", 1.0))


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inner(x)
        return hidden, hidden.mean(0)


def test_the_last_ops_of_outputs_are_compiled_once() -> None:
    engine = whale.parallelize(
        Summed(), loss=lambda output, _: output[0].square().mean(), optimizer=partial(torch.optim.SGD, lr=0.1), batch=torch.randn(4, 4)
    )
    engine.predict(torch.randn(4, 4))
    with patch.object(torch.fx.GraphModule, "recompile", side_effect=AssertionError("compiled again")):
        for num_rows in (4, 6):
            hidden, mean = engine.predict(torch.randn(num_rows, 4))
            assert torch.allclose(hidden.mean(0), mean)
