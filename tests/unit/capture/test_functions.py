"""What is one op of a captured graph: custom autograd functions, the CTC loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale
from tests.examples import slow
from tests.hf_models import gpt2
from tests.unit.capture.running import assert_same
from whale.axes import discover
from whale.capture import capture

torch.set_num_threads(1)


class Steep(torch.autograd.Function):
    """Pointwise, with a backward that is no derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 7 * x


class Product(torch.autograd.Function):
    """Two results, two tensors and a constant, in the newer form."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x @ weight * scale, x.sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.T, x.T @ gradients[0] * ctx.scale * 2, None


class Passed(torch.autograd.Function):
    """Returns what it is given, and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, total = Product.apply(Steep.apply(self.linear(x)), self.linear.weight, 3.0)
        return y + Passed.apply(total)[:, None]


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("rows", [slow(2), 5])
def test_functions_keep_their_backward(rows: int) -> None:
    model = Net()
    graph, program = capture(model, torch.randn(4, 4), squares)
    assert graph.dynamic
    assert_same(model, graph, program, torch.randn(rows, 4), lambda own, batch: squares(own(batch), batch))


def test_only_pointwise_functions_are_divided() -> None:
    graph, _ = capture(Net(), torch.randn(4, 4), squares)
    calls = {op.target.rpartition(".")[2]: op for op in graph.ops if op.target.startswith("tests.")}
    assert list(calls) == ["Steep", "Product", "Passed"]
    assert [("pointwise" in op.tags) for op in calls.values()] == [True, False, True]
    assert [mixing.op for mixing in discover(graph).mixing][:1] == [calls["Product"].name]


class Reversed(torch.autograd.Function):
    """Turns the gradient round, as it is mostly written: what it returns is a view of what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradients[0], None


class Swapped(torch.autograd.Function):
    """A view of another shape: the rows are those of the other dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.reshape(x.shape[1], x.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].reshape(gradients[0].shape[1], gradients[0].shape[0])


class Reversing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return Reversed.apply(h, 0.3), Swapped.apply(h)


def test_a_view_is_pointwise_where_it_keeps_the_shape() -> None:
    graph, _ = capture(Reversing(), torch.ones(4, 6), lambda output, batch: output[0].mean() + output[1].square().mean())
    calls = {op.target.rpartition(".")[2]: "pointwise" in op.tags for op in graph.ops if op.target.startswith("tests.")}
    assert calls == {"Reversed": True, "Swapped": False}


class Blocks(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, slow(True)])
def test_what_the_model_checkpoints_is_computed_again(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model, batch = Blocks(use_reentrant), torch.randn(8, 4)
    engine = whale.parallelize(model, loss=squares, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batch)
    assert [(part.first, part.last) for part in engine.plan.replicas[0].stages[0].program if part.recompute] == [
        ("linear", "linear_1"),
        ("linear_2", "linear_3"),
    ]
    expected = squares(model(batch.requires_grad_()), batch)
    expected.backward()
    assert torch.isclose(engine.step(batch.detach()), expected.double())
    for name, gradient in engine.gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.slow
def test_gradient_checkpointing_of_a_library_model() -> None:
    model, batch = gpt2()
    plain, _ = capture(model, batch)
    model.gradient_checkpointing_enable()
    graph, _ = capture(model, batch)
    assert [op.target for op in graph.ops] == [op.target for op in plain.ops]
    assert len({op.region for op in graph.ops} - {None}) == model.config.n_layer


@pytest.mark.slow
def test_a_compiled_model_is_read_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1] = torch.compile(model[1])
    compiled = torch.compile(model)
    graph, program = capture(compiled, {"input": torch.randn(4, 4), "target": torch.randn(4, 4)}, lambda output, batch: output.mean())
    assert [op.target for op in graph.ops if op.kind == "call"][:2] == ["aten.linear.default", "aten.relu.default"]
    assert set(program.tensors) == set(compiled.state_dict())  # type: ignore[attr-defined]


FRAMES, LETTERS = 6, 4


class Speech(nn.Module):
    def __init__(self, reduction: str, in_one: bool) -> None:
        super().__init__()
        self.out, self.reduction, self.in_one = nn.Linear(3, LETTERS), reduction, in_one

    def forward(self, sound: Tensor, said: Tensor, lengths: Tensor) -> Tensor:
        scores = self.out(sound).log_softmax(-1).transpose(0, 1)
        frames = torch.full_like(lengths, FRAMES)
        targets = said.masked_select(torch.arange(2) < lengths[:, None]) if self.in_one else said
        loss = F.ctc_loss(scores, targets, frames, lengths, reduction=self.reduction, zero_infinity=True)
        return loss.square().sum() if self.reduction == "none" else loss


def batch(rows: int) -> dict[str, Tensor]:
    said = torch.randint(1, LETTERS, (rows, 2))
    return {"sound": torch.randn(rows, FRAMES, 3), "said": said, "lengths": torch.randint(1, 3, (rows,))}


def own(output: Tensor, batch: Any) -> Tensor:
    return output


@pytest.mark.parametrize(
    ("reduction", "in_one"),
    [("mean", False), ("none", True), slow("sum", False), slow("mean", True), slow("sum", True), slow("none", False)],
)
def test_the_loss_is_that_of_the_rows(reduction: str, in_one: bool) -> None:
    torch.manual_seed(0)
    model = Speech(reduction, in_one)
    graph, program = capture(model, batch(4), own)
    assert graph.dynamic
    assert not graph.warnings
    for rows in (2, 5):
        assert_same(model, graph, program, batch(rows), lambda called, given: called(**given))
