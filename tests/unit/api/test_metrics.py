"""What a loss function returns with the loss: of the same pass, over the whole batch, and nothing that trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from whale.errors import CaptureError

Batch = dict[str, Tensor]


class Probed(nn.Module):
    """A head that only a metric reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.probe = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x).tanh()
        return {"scores": self.head(features), "probe": self.probe(features.detach())}


def loss_with_metrics(output: Mapping[str, Tensor], batch: Batch) -> dict[str, Any]:
    scores, labels = output["scores"], batch["label"]
    loss, correct, chosen = F.cross_entropy(scores, labels), scores.argmax(1) == labels, labels > 0
    total = loss * 1.0
    total += 0.1 * scores.square().mean()
    return {
        "loss": total,
        "entropy": loss,
        "with the rest": total,
        "accuracy": correct.float().mean(),
        "correct": correct.sum(),
        "of those chosen": (correct & chosen).sum() / chosen.sum(),
        "precision": (correct & (scores.argmax(1) == 0)).sum() / (scores.argmax(1) == 0).sum().clamp(min=1),
        "probe": F.cross_entropy(output["probe"], labels),
    }


def made(loss: Callable[..., Any] = loss_with_metrics, config: Mapping[str, Any] | None = None) -> tuple[nn.Module, Batch, whale.Engine]:
    torch.manual_seed(0)
    model, batch = Probed(), {"x": torch.randn(12, 6), "label": torch.randint(3, (12,))}
    optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    config = {"pipeline.num_micro_batch": 3, "planning.search": "off", **(config or {})}
    return model, batch, whale.parallelize(model, loss=loss, optimizer=optimizer, batch=batch, config=config)


def test_metrics_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    model, batch, engine = made(config={"runtime.log_file": str(tmp_path / "log")})
    expected = {name: value.detach() for name, value in loss_with_metrics(model(batch["x"]), batch).items()}
    probe = model.probe.weight.detach().clone()
    calls = (engine.evaluate, engine.forward_backward)
    for call in calls:
        loss = call(batch)
        found = engine.metrics
        assert [*found] == [*expected][1:]
        for name, value in {"loss": loss.double(), **found}.items():
            torch.testing.assert_close(value, expected[name].double(), msg=f"{call.__name__}: {name}", rtol=1e-6, atol=1e-6)
    engine.update()
    assert torch.equal(engine.tensors["probe.weight"], probe)  # no gradient, so no weight decay
    engine.close()
    [line] = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line)["metrics"]["accuracy"] == pytest.approx(float(expected["accuracy"]))


def weighted(output: Mapping[str, Tensor], batch: Batch) -> dict[str, Any]:
    chosen = batch["label"] > 0
    count, total = chosen.sum(), (F.cross_entropy(output["scores"], batch["label"], reduction="none") * chosen).sum()
    mean = total / count
    return {"loss": (total, count), "mean": mean, "count": count, "again": count}


def test_metrics_may_be_parts_of_the_loss() -> None:
    model, batch, engine = made(weighted)
    expected = weighted(model(batch["x"]), batch)
    loss = engine.step(batch)
    torch.testing.assert_close(loss, engine.metrics["mean"])
    assert float(engine.metrics["count"]) == float(engine.metrics["again"]) == float(expected["count"])
    losses = [op for op in engine.model_graph.ops if "cross_entropy" in op.target]
    assert len(losses) == 1
    engine.close()


def made_in_place(output: Mapping[str, Tensor], batch: Batch) -> dict[str, Any]:
    loss = output["scores"].square().sum()
    before = loss.clone()
    loss += F.cross_entropy(output["scores"], batch["label"])
    return {"loss": loss * output["scores"].detach().exp().mean().detach(), "before": before}


def test_a_metric_is_what_it_was_before_a_write() -> None:
    model, batch, engine = made(made_in_place, {"pipeline.num_micro_batch": 1})
    expected = {name: value.detach().double() for name, value in made_in_place(model(batch["x"]), batch).items()}
    loss = engine.step(batch)
    torch.testing.assert_close({"loss": loss.double(), **engine.metrics}, expected, rtol=1e-6, atol=1e-6)
    engine.close()


def aliased(output: Mapping[str, Tensor], batch: Batch) -> dict[str, Any]:
    loss = output["scores"].square().sum()
    alias = loss.detach()
    loss += F.cross_entropy(output["scores"], batch["label"])
    return {"loss": loss, "alias": alias}


def test_a_metric_that_is_not_finite_stops_no_training() -> None:
    _, batch, engine = made(lambda output, batch: {"loss": output["scores"].square().mean(), "odd": output["scores"].mean() / 0})
    engine.step(batch)
    assert not engine.metrics["odd"].isfinite()
    engine.close()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, batch: {"entropy": output["scores"].mean()}, 'a mapping without "loss": it has entropy'),
        (lambda output, batch: {"loss": output["scores"].mean(), "scores": output["scores"]}, r"metric 'scores' .* is float32 of shape"),
        (aliased, "a value that shares its memory is read after that"),
        (lambda output, batch: {"loss": output["scores"].mean(), "": output["scores"].mean()}, "metric '' that is returned"),
        (lambda output, batch: {"loss": output["scores"].mean(), "rate": 0.1}, "metric 'rate' .* is float, not a scalar tensor"),
        (
            lambda output, batch: {"loss": output["scores"].mean(), "half": batch["label"].shape[0] / 2},
            "metric 'half' .* is a number made of the batch's sizes, not a scalar tensor",
        ),
        (lambda output, batch: {"loss": output["scores"].mean().detach(), "m": output["scores"].mean()}, "does not depend on any"),
    ],
    ids=["no loss", "not a scalar", "an alias", "no name", "no tensor", "a number of rows", "only a metric depends on parameters"],
)
def test_what_is_no_metric_is_refused(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        made(loss)
