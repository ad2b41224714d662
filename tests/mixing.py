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
    "fused attention": lambda h: F.scaled_dot_product_attention(*(h[None, None] * factor for factor in (1.0, 2.0, 3.0)))[0, 0],
    "fused causal attention": lambda h: F.scaled_dot_product_attention(*(h[None] * f for f in (1.0, 2.0, 3.0)), is_causal=True)[0],
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


def _chosen(h: Tensor) -> Tensor:
    """A mask of most rows."""
    return h[:, 0] > -0.95


def _experts(h: Tensor, select: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
    """Two experts, each on the rows that choose it; their results are added to those rows."""
    choice, out = (h[:, 0] > h[:, 1]).long(), torch.zeros_like(h)
    for number in range(2):
        (rows,) = select(choice == number)
        out.index_add_(0, rows, h[rows].sin() * (number + 1) * h[rows, 2, None])
    return out


def _masked_experts(h: Tensor) -> Tensor:
    out = h.clone()
    for number in range(2):
        out[(h[:, 0] > 0) == bool(number)] = h[(h[:, 0] > 0) == bool(number)].sin() * (number + 1)
    return out


def _elements(h: Tensor) -> Tensor:
    """Chosen elements, by their rows and columns; then some of these."""
    rows, columns = torch.where(h > 0)
    mine = h[rows, columns].cos()
    return h.index_put((rows[mine > 0.9], columns[mine > 0.9]), mine[mine > 0.9], accumulate=True)


def _put_back(h: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    (rows,) = torch.where(_chosen(h))
    return h.index_copy(0, rows, change(h[rows]))


SELECTING: dict[str, Callable[[Tensor], Tensor]] = {
    "experts": lambda h: _experts(h, torch.where),
    "experts by nonzero": lambda h: _experts(h, lambda mask: (mask.nonzero().squeeze(1),)),
    "experts by columns": lambda h: _experts(h, lambda mask: (mask.nonzero()[:, 0],)),
    "experts by numbers": lambda h: _experts(h, lambda mask: (_places(mask)[mask],)),
    "masked experts": _masked_experts,
    "elements": _elements,
    "chosen columns": lambda h: h * h[:, torch.arange(WIDTH) % 2 == 0].mean(1, keepdim=True),
    "sums of chosen": lambda h: h + torch.zeros_like(h).index_add(0, torch.where(_chosen(h))[0], h[_chosen(h)]),
}
"""What selects rows by values, and keeps what it makes of each in its row."""

MIXING_SELECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of chosen": lambda h: h - h[_chosen(h)].mean(0),
    "sum of chosen": lambda h: h - h[_chosen(h)].sum(0),
    "softmax of chosen": lambda h: _put_back(h, lambda chosen: chosen.softmax(0)),
    "cumsum of chosen": lambda h: _put_back(h, lambda chosen: chosen.cumsum(0)),
    "chosen in turn": lambda h: _put_back(h, lambda chosen: chosen.flip(0)),
    "number of chosen": lambda h: h * torch.where(_chosen(h))[0].shape[0],
    "chosen over their number": lambda h: _put_back(h, lambda chosen: chosen / chosen.shape[0]),
    "ones of chosen": lambda h: h * torch.ones(torch.where(_chosen(h))[0].shape[0], dtype=h.dtype).sum(),
    "places of chosen": lambda h: _put_back(h, lambda chosen: chosen * _places(chosen)[:, None]),
    "rows of chosen": lambda h: _put_back(h, lambda chosen: chosen + torch.where(_chosen(h))[0][:, None]),
    "first chosen": lambda h: h - h[_chosen(h)][0],
    "attention of chosen": lambda h: _put_back(h, lambda chosen: (chosen @ chosen.T).softmax(1) @ chosen),
    "chosen beside all": lambda h: h + torch.zeros_like(h).index_copy(0, torch.where(_chosen(h))[0] * 0, h[_chosen(h)]),
}
"""What selects rows by values, and lets them depend on one another."""

MIDDLES |= SELECTING | MIXING_SELECTED


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
    "sum of chosen": lambda o, b: _error(o, b)[b["m"] > 0].sum() / b["m"].sum(),
    "chosen": lambda o, b: _error(o, b).sum(1)[b["y"][:, 0] > 0].mean(),
    "chosen over their number": lambda o, b: o[b["m"] > 0].square().sum() / torch.where(b["m"] > 0)[0].shape[0],
    "loss of chosen": lambda o, b: _squares((o - b["y"])[b["y"][:, 0] > 0]),
    "entropy of chosen": lambda o, b: F.cross_entropy(o[b["m"] > 0], b["y"].argmax(1)[b["m"] > 0]),
    "masked": lambda o, b: (_error(o, b).sum(1) * b["m"]).sum() / b["m"].sum().clamp(min=1),
    "root": lambda o, b: _error(o, b).mean().sqrt(),
    "logarithm": lambda o, b: _error(o, b).sum().log(),
    "squared sums": lambda o, b: (o - b["y"]).sum(0).square().sum(),
    "hardest": lambda o, b: _error(o, b).sum(1).topk(2).values.mean(),
    "advantages": lambda o, b: ((b["y"] - b["y"].mean()) / (b["y"].std() + 1e-5) * o).mean(),
    "dice": lambda o, b: 1 - 2 * (o * b["y"]).sum() / (o.square().sum() + b["y"].square().sum()),
    "contrastive": lambda o, b: F.cross_entropy(o @ b["y"].T, _places(o)),
    "two views": lambda o, b: F.cross_entropy(_similarities(o, b["y"]), _places(o).roll(0).repeat(2)),
    "covariance": lambda o, b: (o.T @ o / o.shape[0] - torch.eye(OUTPUTS, dtype=o.dtype)).square().sum(),
    "regulariser of a mean": lambda o, b: _error(o, b).mean() + o.mean().square(),
    "places": lambda o, b: (_error(o, b).mean(1) * _places(o)).mean(),
}


def _squares(differences: Tensor) -> Tensor:
    return F.mse_loss(differences, torch.zeros_like(differences))


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
