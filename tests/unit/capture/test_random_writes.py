"""Random models that write: views, slices, in place, without gradients, buffers; in parts of a batch they equal the plain loop, or say no.

Each program is run by one rank as two stages with micro-batches of unlike rows, and its gradients are those that replicas would sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from tests import reference
from tests.written_models import make_batch, squares
from whale.capture import capture
from whale.errors import CaptureError, PlanError
from whale.ir.reach import reached_parameters

torch.set_num_threads(1)

Step = Callable[["Random", Tensor, Tensor], Tensor]


class Random(nn.Module):
    """Steps one after another, each from what the last made and from the input."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(names))
        self.names = names
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in names)
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.register_buffer("count", torch.ones((), dtype=torch.float64))
        self.register_buffer("vector", torch.linspace(-1.0, 1.0, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for name, layer in zip(self.names, self.layers, strict=True):
            h = STEPS[name](self, layer(h).tanh(), x)
        return h


def in_place(net: Random, h: Tensor, x: Tensor) -> Tensor:
    out = h * 2
    out.add_(x).mul_(0.5)
    return out


def through_slices(net: Random, h: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1:] = h[:, :-1]
    out[:, 0] += x[:, 3] * net.layers[0].bias[0]
    return out


def through_nested_views(net: Random, h: Tensor, x: Tensor) -> Tensor:
    out = h.clone()
    view = out.view(-1, 2, 2)
    view[:, 0].mul_(2.0)
    view.transpose(1, 2)[:, 1] += x[:, :2]
    return out + view.reshape(-1, 4)


def without_gradients(net: Random, h: Tensor, x: Tensor) -> Tensor:
    out = h + x
    with torch.no_grad():
        out.clamp_(-0.5, 0.5)
        out[:, 2] = 0.25
    return out


def by_data(net: Random, h: Tensor, x: Tensor) -> Tensor:
    out = h - x
    out.data.mul_(1.5)
    return out


def counted(net: Random, h: Tensor, x: Tensor) -> Tensor:
    net.count += 1
    return h / net.count


def counted_by_name(net: Random, h: Tensor, x: Tensor) -> Tensor:
    net.count = net.count * 1.5
    return h


def iterated(net: Random, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.vector.copy_(torch.tanh(net.layers[0].weight @ net.vector))
    return h * net.vector


def averaged(net: Random, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.vector.mul_(0.7).add_(h.mean(0), alpha=0.3)
    return h


def added(net: Random, h: Tensor, x: Tensor) -> Tensor:
    net.count += (h.detach() > 0).sum()
    return h


def averaged_squares(net: Random, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.vector.lerp_(h.square().sum(0) / x.shape[0], 0.2)
    return h


def largest(net: Random, h: Tensor, x: Tensor) -> Tensor:
    net.vector = torch.maximum(net.vector, h.detach().amax(0))
    return h


def read(net: Random, h: Tensor, x: Tensor) -> Tensor:
    return h * net.vector + net.count


def clamped_parameter(net: Random, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.layers[0].weight.clamp_(-0.1, 0.1)
    return h


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (in_place, through_slices, through_nested_views, without_gradients, by_data, counted, counted_by_name)
    + (iterated, averaged, added, averaged_squares, largest, read, clamped_parameter)
}
OPTIMIZER = partial(torch.optim.SGD, lr=0.05, weight_decay=0.1)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4).map(tuple),
    num_micro_batch=st.sampled_from((1, 2, 3)),
    chunks=st.sampled_from((1, 2)),
)
@example(names=("read", "largest"), num_micro_batch=1, chunks=1)
@example(names=("iterated", "counted_by_name"), num_micro_batch=2, chunks=2)
def test_what_is_not_refused_equals_the_plain_loop(names: tuple[str, ...], num_micro_batch: int, chunks: int) -> None:
    model = Random(names)
    batches = [make_batch(rows, seed) for seed, rows in enumerate((6, 7))]
    given_batches = copy.deepcopy(batches)
    try:
        expected = reference.train(copy.deepcopy(model), squares, copy.deepcopy(batches), OPTIMIZER)
    except RuntimeError:  # torch refuses the model: it writes what the backward pass still needs
        reject()
    config = {"pipeline.num_micro_batch": num_micro_batch}
    config |= {"pipeline.schedule": "interleaved", "pipeline.num_chunks": chunks} if chunks > 1 else {}
    try:
        graph, _ = capture(model, make_batch(6, 0), squares)
        engine = whale.parallelize(copy.deepcopy(model), loss=squares, optimizer=OPTIMIZER, batch=make_batch(6, 0), config=config)
    except CaptureError:
        assert "clamped_parameter" in names
        return
    except PlanError:
        assert num_micro_batch > 1 and {"largest", "averaged", "averaged_squares", "added"} & set(names)
        return
    except whale.WhaleError as error:
        assert "can be cut" in str(error) and chunks > 1
        return
    losses = [float(engine.step(batches[0]))]
    gradients = reference.copy_of(engine.gradients())
    losses.append(float(engine.step(batches[1])))
    found = reference.Run(losses, gradients, reference.copy_of(engine.state_dict() or {}))
    engine.close()
    error, where = reference.largest_error(found, expected)
    assert error < 1e-10, (error, where)
    assert reached_parameters(graph) == set(expected.gradients)
    assert all(torch.equal(a, b) for pair in zip(batches, given_batches, strict=True) for a, b in zip(*pair, strict=True))
