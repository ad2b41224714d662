"""Writes: through views, without gradients, to `.data`, in the loss, to buffers by another name; what is refused, by its text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.examples import slow
from tests.unit.capture.running import assert_same
from whale.capture import capture
from whale.errors import CaptureError
from whale.ir.graph import ModelGraph
from whale.ir.writes import reached_parameters

torch.set_num_threads(1)

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two layers, a decay, a counter and an average; forward is a function of the module and its input."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decay = nn.Parameter(torch.full((4,), -0.5))
        self.table = nn.Embedding(6, 4, max_norm=1.0)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("vector", torch.arange(1.0, 5.0))
        self.register_buffer("short", torch.ones(1), persistent=False)
        self.held = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def check(forward: Forward, loss: Callable[[Any, Any], Tensor] = squares) -> ModelGraph:
    """The capture of a model, which computes what the model does and knows which parameters have gradients."""
    model = Net(forward)
    graph, program = capture(model, rows(4), loss)
    for count in (4, 7):
        assert_same(model, graph, program, rows(count), lambda net, batch: loss(net(batch.clone()), batch))
    trained = copy.deepcopy(model)
    loss(trained(rows(4)), rows(4)).backward()
    assert reached_parameters(graph) == {name for name, parameter in trained.named_parameters() if parameter.grad is not None}
    return graph


def recurrence(net: Net, x: Tensor) -> Tensor:
    """Gradients of the decay reach the loss through writes to columns alone."""
    values, out, state = net.first(x), torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for column in range(4):
        out[:, column] = state + values[:, column]
        state = state * net.decay.exp()[column] + values[:, column]
    return out


def clamped(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    with torch.no_grad():
        y.clamp_(-0.2, 0.2)
    return net.second(y)


def clamped_by_a_view(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    with torch.no_grad():
        y.view(-1).mul_(2.0)
        y[:, 0] = 3.0
    return net.second(y) * y


def data(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    y.data.mul_(0.5)
    y.data[:, 1] = 1.0
    return net.second(y)


def written_with_gradients_behind_detach(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    seen = y.detach()
    with torch.no_grad():
        seen.copy_(net.second(x))
    return net.second(y)


def the_batch(net: Net, x: Tensor) -> Tensor:
    x[:, 0] = 0.0
    return net.first(x) + x


def out_of(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.vector = F.normalize(net.first.weight @ net.vector, dim=0, out=net.vector)
    return net.second(x) * net.vector


def put_in_place(net: Net, x: Tensor) -> Tensor:
    net.count = net.count + 1
    net.vector = 0.9 * net.vector + 0.1 * net.first.weight.detach().mean(0)
    return net.first(x) * net.count + net.vector


def permuted_and_written(net: Net, x: Tensor) -> Tensor:
    """An einsum that only permutes returns a view."""
    y = net.first(x)
    turned = torch.einsum("ij->ji", y)
    turned.add_(net.second(x).t())
    return y * 2


def frequencies(net: Net, x: Tensor) -> Tensor:
    """What is written, and where, is complex."""
    spectrum = torch.fft.rfft(net.first(x), dim=1)
    out = torch.zeros_like(spectrum)
    out[:, :2] = spectrum[:, :2] * torch.view_as_complex(net.second.weight.view(2, 4, 2))[:, :2].sum(0)
    return torch.fft.irfft(out, n=4, dim=1)


WRITES = (recurrence, clamped, clamped_by_a_view, data, written_with_gradients_behind_detach, the_batch, out_of, put_in_place)
DEAR = (recurrence, clamped_by_a_view, out_of, put_in_place, frequencies)
"""To check."""


@pytest.mark.parametrize("forward", [*map(slow, DEAR), *(write for write in WRITES if write not in DEAR), permuted_and_written])
def test_writes_are_what_they_are_in_the_model(forward: Forward) -> None:
    check(forward)


def by_a_view(output: Tensor, batch: Any) -> Tensor:
    loss = output.square().mean()
    loss.view(1).mul_(3.0)
    return loss


def by_places(output: Tensor, batch: Any) -> Tensor:
    parts = torch.zeros(2)
    parts[0], parts[1] = output.square().mean(), output.abs().mean()
    return parts.sum()


def by_rows(output: Tensor, batch: Any) -> Tensor:
    parts = output.new_zeros(output.shape[0])
    parts[:] = output.square().mean(-1)
    return parts.mean()


def added_up(output: Tensor, batch: Any) -> Tensor:
    total = torch.zeros(())
    total += output.square().mean()
    total += 0.5 * output.abs().sum()
    return total


@pytest.mark.parametrize(("loss", "is_exact"), [(by_a_view, False), (by_places, False), (by_rows, True), (added_up, True)])
def test_a_loss_that_is_written_is_exact_or_says_that_it_is_not(loss: Callable[[Any, Any], Tensor], is_exact: bool) -> None:
    graph = check(lambda net, x: net.first(x), loss)
    assert all(term.exact for term in graph.loss) is is_exact


def of_a_parameter(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.second.weight.clamp_(-0.1, 0.1)
    return net.second(x)


def of_a_parameter_by_data(net: Net, x: Tensor) -> Tensor:
    net.second.weight.data.mul_(0.5)
    return net.second(x)


def of_looked_up_rows(net: Net, x: Tensor) -> Tensor:
    return net.table(torch.arange(4)).sum(0) * x


def of_what_is_no_buffer(net: Net, x: Tensor) -> Tensor:
    net.held.add_(1.0)
    return net.first(x) * net.held


def of_data(net: Net, x: Tensor) -> Tensor:
    net.second.weight.data = 0.5 * net.second.weight.data
    return net.second(x)


def of_another_shape(net: Net, x: Tensor) -> Tensor:
    net.vector = torch.ones(5)
    return net.first(x)


def of_a_new_buffer(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "mean"):
        net.register_buffer("mean", torch.zeros(4))
    net.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return net.first(x) + net.mean


def of_a_new_count(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "calls"):
        net.register_buffer("calls", torch.zeros(()))
    net.calls += 1
    return net.first(x) * net.calls


def of_a_buffer_that_grows(net: Net, x: Tensor) -> Tensor:
    net.register_buffer("short", torch.cat([net.short, torch.ones(1)]), persistent=False)
    return net.first(x) * net.short.sum()


def of_a_new_parameter(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "scale"):
        net.scale = nn.Parameter(torch.ones(4))
    return net.first(x) * net.scale


REFUSED = {
    of_a_new_buffer: "forward registers buffer mean, which is made of %",
    of_a_new_count: "forward registers buffer calls, which is written to after that, and which would be made anew in each step\n  at ",
    of_a_buffer_that_grows: "forward registers buffer short, which is made of %b_short, and which would be made anew in each step\n  at ",
    of_a_new_parameter: "forward registers parameter scale of Net, which no optimizer would step\n",
    of_a_parameter: "aten.clamp_.default writes second.weight, which is a parameter\n  at ",
    of_a_parameter_by_data: "aten.mul_.Tensor writes second.weight, which is a parameter\n  at ",
    of_looked_up_rows: "aten.embedding_renorm_.default writes table.weight, which is a parameter\n  at ",
    of_what_is_no_buffer: "aten.add_.Tensor writes c_model_held, which is not a buffer of the model\n  at ",
    of_data: "the model assigns .data of a tensor, which is not supported\n  at ",
    of_another_shape: "forward changes the shape or type of buffer vector of Net from float32 of shape [4] to float32 of shape [5]\n",
}


@pytest.mark.parametrize(("forward", "text"), REFUSED.items())
def test_writes_that_outlast_the_step_are_refused(forward: Forward, text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Net(forward), rows(4), squares)
    assert str(caught.value).startswith(text), str(caught.value)


def test_the_batch_is_left_as_it_is() -> None:
    model = Net(the_batch)
    _, program = capture(model, rows(4), squares)
    batch = rows(4)
    program.module()(*program.values(batch).values())
    assert torch.equal(batch, rows(4))
