"""What mixes samples that a plan computes apart is said once, with the user's lines; where nothing is apart, nothing is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.examples import slow

torch.set_num_threads(1)

Batch = dict[str, Tensor]


class Layer(nn.Module):
    """A layer with something in its middle."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.middle, self.first, self.last = middle, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        return y


def mean_square(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["y"])


def hardest(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["y"]).square().sum(1).topk(2).values.mean()


def normalised(output: Tensor, batch: Batch) -> Tensor:
    return ((batch["y"] - batch["y"].mean()) / batch["y"].std() * output).mean()


def dice(output: Tensor, batch: Batch) -> Tensor:
    both, each = (output * batch["y"]).sum(), output.square().sum() + batch["y"].square().sum()
    return 1 - 2 * both / each


def contrastive(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output @ batch["y"].T, torch.arange(output.shape[0]))


MIXING: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Batch], Tensor], str]] = {
    "softmax": (lambda h: h.softmax(0), mean_square, "aten.softmax.int reads all of it at once"),
    "cumsum": (lambda h: h.cumsum(0), mean_square, "aten.cumsum.default reads all of it at once"),
    "sort": (lambda h: h.sort(0).values, mean_square, "aten.sort.default reads all of it at once"),
    "roll": (lambda h: h.roll(1, 0), mean_square, "aten.roll.default reads all of it at once"),
    "flip": (lambda h: h.flip(0), mean_square, "aten.flip.default reads all of it at once"),
    "normalisation": (lambda h: F.normalize(h, dim=0), mean_square, "aten.linalg_vector_norm.default reads all of it at once"),
    "batch norm": (
        lambda h: F.batch_norm(h, None, None, training=True),
        mean_square,
        "aten.batch_norm.default takes statistics over all of it",
    ),
    "attention": (lambda h: (h @ h.T).softmax(-1) @ h, mean_square, "aten.matmul.default meets it twice"),
    "arange": (lambda h: h * torch.arange(h.shape[0])[:, None], mean_square, "aten.mul.Tensor computes with the positions of rows"),
    "eye": (lambda h: torch.eye(h.shape[0]) @ h, mean_square, "aten.eye.default"),
    "number of rows": (lambda h: h / h.shape[0], mean_square, "aten.div.Tensor computes with the number of rows"),
    "root": (nn.Identity(), lambda output, batch: mean_square(output, batch).sqrt(), "is not a sum over the rows of the batch"),
    "hardest": (nn.Identity(), hardest, "is not a sum over the rows of the batch"),
    "advantages": (nn.Identity(), normalised, "aten.mean.default"),
    "dice": (nn.Identity(), dice, "is not a sum over the rows of the batch"),
    "contrastive": (nn.Identity(), contrastive, "aten.matmul.default meets it twice"),
}


def parallelize(name: str, num_micro_batch: int) -> list[str]:
    """The warnings of a model in so many micro-batches, with its first step."""
    torch.manual_seed(0)
    middle, loss, _ = MIXING[name]
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = whale.parallelize(
            Layer(middle),
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch=batch,
            config={"pipeline.num_micro_batch": num_micro_batch},
        )
        engine.step(batch)
        engine.close()
    assert all(warning.filename == __file__ for warning in caught if "the batch" in str(warning.message))
    return [str(warning.message) for warning in caught if "the batch" in str(warning.message)]


@pytest.mark.parametrize("name", [name if name in ("softmax", "root") else slow(name) for name in MIXING])
def test_one_warning_names_the_lines(name: str) -> None:
    (text,) = parallelize(name, 2)
    first, *places = text.splitlines()
    assert first == (
        "the batch is needed whole here, and 1 replica of 2 micro-batches see only their own rows of it: "
        "the numbers are not those of one device"
    )
    assert any("test_mixed_samples.py:" in place and MIXING[name][2] in place for place in places), text


@pytest.mark.parametrize("name", ["softmax", "root"])
def test_nothing_is_said_where_the_batch_is_whole(name: str) -> None:
    assert parallelize(name, 1) == []


def test_what_mixes_in_training_alone_is_not_said_of_evaluation() -> None:
    batch = {"input": torch.randn(8, 4), "y": torch.randn(8, 3)}
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.warns(UserWarning, match="module 1: aten.batch_norm.default takes statistics over all of it"):
        engine = whale.parallelize(model, loss=mean_square, batch=batch, config={"pipeline.num_micro_batch": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.evaluate(batch)
    engine.close()


def test_evaluation_says_what_it_mixes() -> None:
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    with pytest.warns(UserWarning):
        engine = whale.parallelize(Layer(lambda h: h.softmax(0)), loss=mean_square, batch=batch, config={"pipeline.num_micro_batch": 2})
    with pytest.warns(UserWarning, match="test_mixed_samples.py:.*aten.softmax.int") as caught:
        engine.predict(batch)
    assert [warning.filename for warning in caught] == [__file__]
    engine.close()


class WithRest(Layer):
    """Also returns its last layer of all rows but the first: no end of the model, for it reads a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden), self.last(hidden[1:])  # type: ignore[return-value]


def test_outputs_of_other_rows_by_a_layer_are_of_one_piece_with_a_warning() -> None:
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    model = WithRest(torch.tanh)
    engine = whale.parallelize(
        model, loss=lambda output, batch: mean_square(output[0], batch), batch=batch, config={"pipeline.num_micro_batch": 2}
    )
    with pytest.warns(UserWarning, match="an output without rows is computed from rows 0 to 3 only"):
        whole, rest = engine.predict(batch)
    torch.testing.assert_close(whole, model(batch["x"])[0].detach())
    torch.testing.assert_close(rest, model(batch["x"])[1][:3].detach())
    engine.close()


class Chosen(Layer):
    """Also returns the rows that a mask selects, their positions, sum and number."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        mask = hidden[:, 0] > 0
        (rows,) = torch.where(mask)
        return {"all": self.last(hidden), "rows": hidden[rows], "where": rows, "sum": hidden[mask].sum(0), "number": mask.sum()}


def test_outputs_of_selected_rows_are_those_of_the_whole_batch() -> None:
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    model = Chosen(torch.tanh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = whale.parallelize(
            model, loss=lambda output, batch: mean_square(output["all"], batch), batch=batch, config={"pipeline.num_micro_batch": 2}
        )
        found = engine.predict(batch)
    torch.testing.assert_close(found, {name: value.detach() for name, value in model(batch["x"]).items()})
    engine.close()
