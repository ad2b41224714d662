"""Models and losses that mix the samples of a batch, and their neighbours that do not; picked by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], object]

FEATURES, WIDTH, OUTPUTS = 4, 6, 3


def _places(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0], device=h.device)


def _bags(words: Tensor, mode: str = "sum", **options: object) -> Tensor:
    table = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
    return F.embedding_bag(words, table, mode=mode, **options)


MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda h: h,
    "softmax of columns": lambda h: h.softmax(1),
    "own row": lambda h: h[_places(h), h.argmax(1)][:, None] * h,
    "repeated rows": lambda h: h.repeat_interleave(2, 0).unflatten(0, (-1, 2)).sum(1),
    "halves": lambda h: torch.sub(*torch.cat([h, h.square()]).chunk(2)),
    "bags": lambda h: h * _bags(h.detach().abs().mul(9).long() % WIDTH),
    "weighted bags": lambda h: h * _bags(h.detach().abs().mul(9).long() % WIDTH, per_sample_weights=h.tanh()),
    "longest word of a bag": lambda h: h * _bags(h.detach().abs().mul(9).long() % WIDTH, mode="max"),
    "bags by frequency": lambda h: h * _bags(h.detach().abs().mul(9).long() % WIDTH, scale_grad_by_freq=True),
    "bags across rows": lambda h: h * _bags(h.T.detach().abs().mul(9).long().reshape(h.shape) % WIDTH),
    "softmax": lambda h: h.softmax(0),
    "cumsum": lambda h: h.cumsum(0),
    "sort": lambda h: h.sort(0).values,
    "roll": lambda h: h.roll(1, 0),
    "flip": lambda h: h.flip(0),
    "normalisation": lambda h: F.normalize(h, dim=0),
    "centred": lambda h: h - h.mean(0),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "attention": lambda h: (h @ h.T).softmax(-1) @ h,
    "places": lambda h: h * (1 + _places(h))[:, None],
    "every other": lambda h: torch.where((_places(h) % 2 == 0)[:, None], h, -h),
    "one hot": lambda h: h * F.one_hot(_places(h) % WIDTH, WIDTH),
    "identity": lambda h: torch.eye(h.shape[0], dtype=h.dtype) @ h,
    "triangle": lambda h: torch.ones(h.shape[0], h.shape[0], dtype=h.dtype).tril() @ h,
    "number of rows": lambda h: h / h.shape[0],
    "counted rows": lambda h: h * torch.ones(h.shape[0], dtype=h.dtype).sum(),
    "first row": lambda h: h - h[:1],
    "largest": lambda h: h / h.detach().abs().max(),
    "distances": lambda h: h * (h[:, None] - h[None]).square().sum((1, 2))[:, None],
}


def _error(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["y"]).square()


LOSSES: dict[str, Loss] = {
    "mean": lambda o, b: _error(o, b).mean(),
    "two steps, sums": lambda o, b: _error(o, b).sum(0).sum(),
    "two steps, mean of sums": lambda o, b: _error(o, b).sum(0).mean(),
    "two steps, sum of means": lambda o, b: _error(o, b).mean(0).sum(),
    "sums over rows": lambda o, b: (_error(o, b).sum(0) / o.shape[0]).sum(),
    "pair of a mean": lambda o, b: (_error(o, b).mean(), 1.0),
    "pair of two": lambda o, b: (_error(o, b).sum(), 2.0),
    "weights": lambda o, b: ((_error(o, b).sum(1) * b["m"]).sum(), b["m"].sum()),
    "masked": lambda o, b: (_error(o, b).sum(1) * b["m"]).sum() / b["m"].sum().clamp(min=1),
    "root": lambda o, b: _error(o, b).mean().sqrt(),
    "logarithm": lambda o, b: _error(o, b).sum().log(),
    "squared sums": lambda o, b: (o - b["y"]).sum(0).square().sum(),
    "chosen": lambda o, b: _error(o, b).sum(1)[b["y"][:, 0] > 0].mean(),
    "advantages": lambda o, b: ((b["y"] - b["y"].mean()) / (b["y"].std() + 1e-5) * o).mean(),
    "dice": lambda o, b: 1 - 2 * (o * b["y"]).sum() / (o.square().sum() + b["y"].square().sum()),
    "contrastive": lambda o, b: F.cross_entropy(o @ b["y"].T, _places(o)),
    "two views": lambda o, b: F.cross_entropy(_similarities(o, b["y"]), _places(o).roll(0).repeat(2)),
    "covariance": lambda o, b: (o.T @ o / o.shape[0] - torch.eye(OUTPUTS, dtype=o.dtype)).square().sum(),
    "regulariser of a mean": lambda o, b: _error(o, b).mean() + o.mean().square(),
    "places": lambda o, b: (_error(o, b).mean(1) * _places(o)).mean(),
}


def _similarities(left: Tensor, right: Tensor) -> Tensor:
    both = F.normalize(torch.cat([left, right]), dim=1)
    return both @ left.T


class Layers(nn.Module):
    """Two linear layers with something in between, in float64."""

    def __init__(self, middle: str, *, normalised: bool = False, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle = MIDDLES[middle]
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum) if normalised else nn.Identity()
        self.double().train()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.norm(self.first(x)).tanh()))
        return y


def make_batch(num_rows: int, seed: int = 0) -> Batch:
    """Inputs, targets and a mask of which the last is set."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, FEATURES, dtype=torch.float64, generator=random)
    y = torch.randn(num_rows, OUTPUTS, dtype=torch.float64, generator=random)
    m = torch.randint(0, 2, (num_rows,), generator=random).double()
    m[-1], y[-1, 0] = 1.0, 1.0
    return {"x": x, "y": y, "m": m}


def value_of(found: object) -> Tensor:
    """A loss, from itself or from a pair."""
    value = found[0] / found[1] if isinstance(found, tuple) else found
    assert isinstance(value, Tensor)
    return value
