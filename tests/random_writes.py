"""Models of random steps that write: views, slices, in place, without gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

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


def decayed(net: Random, h: Tensor, x: Tensor) -> Tensor:
    net.vector = 0.5 * net.vector + (h > 0).to(h.dtype).sum(0)
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
    + (iterated, averaged, decayed, added, averaged_squares, largest, read, clamped_parameter)
}

NEEDS_WHOLE_BATCH = frozenset({"largest", "averaged", "averaged_squares", "added", "decayed"})
