"""An operator of a user's own, registered once: right in a loss, a metric, a buffer and in what mixes samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.unit.axes.test_updates import together
from tests.unit.capture.exported import split
from whale.axes import discover, register_rule
from whale.axes.operators.registry import _own_rules
from whale.axes.updates import buffer_updates
from whale.capture import capture
from whale.errors import ConfigError
from whale.ir.graph import ModelGraph

torch.set_num_threads(1)


@torch.library.custom_op("own_operators::energy", mutates_args=())
def energy(x: Tensor) -> Tensor:
    """Squares, summed over rows."""
    return x.square().sum(0)


@torch.library.custom_op("own_operators::damp", mutates_args=())
def damp(x: Tensor) -> Tensor:
    return 0.5 * x


energy.register_fake(lambda x: x.new_empty(x.shape[1:]))
energy.register_autograd(
    lambda context, gradient: 2 * context.saved_tensors[0] * gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
damp.register_fake(torch.empty_like)
damp.register_autograd(lambda context, gradient: 0.5 * gradient)


@pytest.fixture
def rules() -> Iterator[None]:
    token = _own_rules.set({})
    register_rule("own_operators::energy", "x[(n:sum) d] -> [d]")
    register_rule("own_operators::damp", "x[...] -> [...]", rows="linear")
    yield
    _own_rules.reset(token)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.register_buffer("b", torch.arange(1.0, 5.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        write(self.b, x)
        return self.layer(x)


def write(b: Tensor, x: Tensor) -> None:
    b.mul_(0.9).add_(damp(energy(x)))


def loss_and_metric(output: Tensor, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    total = damp(energy(output)).sum()
    return {"loss": total / len(output), "energy": total}


def captured() -> ModelGraph:
    return capture(Net(), (torch.randn(6, 4, dtype=torch.float64),), loss_and_metric)[0]


def test_one_rule_is_read_in_losses_metrics_buffers_and_mixing(rules: None) -> None:
    graph = captured()
    assert [(term.metric, term.reason) for term in graph.loss] == [("", ""), ("energy", "")]
    assert buffer_updates(graph)["b"].kind == "sum"
    assert discover(graph).mixing == ()


def test_without_a_rule_nothing_is_taken_for_granted() -> None:
    graph = captured()
    assert all("is not a sum over the rows" in term.reason for term in graph.loss)
    assert buffer_updates(graph)["b"].kind == "whole"
    assert discover(graph).mixing


def test_parts_give_the_loss_and_the_buffer_of_the_whole_batch(rules: None) -> None:
    rows, weight = torch.randn(9, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    found = split(lambda w, x: damp(energy(x @ w[0])).mean() / x.shape[0], [weight], [rows[:6]])
    torch.testing.assert_close(found.pieces([rows], (4, 2, 3)), found.model(rows), rtol=0, atol=1e-12)
    expected = Net().b
    write(expected, rows)
    torch.testing.assert_close(together(write, rows.split([4, 2, 3]), buffer_updates(captured())["b"]), expected, rtol=0, atol=1e-12)


def test_an_unknown_word_for_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mean' of 'own_operators::damp' is unknown\n  hint: 'linear', or leave it out"):
        register_rule("own_operators::damp", "x[...] -> [...]", rows="mean")
