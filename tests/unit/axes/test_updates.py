"""The law of buffers that forward writes: what parts of a batch write gives what the whole batch writes, or is said not to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.examples import slow
from whale.axes.updates import Update, buffer_updates
from whale.capture import capture
from whale.ir.graph import ModelGraph

torch.set_num_threads(1)

Write = Callable[[Tensor, Tensor], object]
"""Reads a buffer [4] and rows [b 4], and writes the buffer."""


def constants(b: Tensor) -> Tensor:
    return torch.arange(16.0, dtype=b.dtype).reshape(4, 4)


ADDED: dict[str, Write] = {
    "sums": lambda b, x: b.add_(x.sum(0)),
    "sums of selected rows": lambda b, x: b.add_(x[x[:, 0] > 0].sum(0)),
    "a count": lambda b, x: b.add_((x > 0).count_nonzero(0)),
    "a histogram": lambda b, x: b.add_(torch.bincount(x.argmax(1), minlength=4)),
    "filled along the rows": lambda b, x: b.add_(torch.full((len(x),), 0.5).sum()),
    "filled with the number of rows": lambda b, x: b.add_(x.new_full((), len(x))),
    "means times rows": lambda b, x: b.add_(x.mean(0) * len(x)),
    "joined sums": lambda b, x: b.add_(torch.cat([x[:, :2].sum(0), x[:, 2:].sum(0)], 0)),
    "moved sums": lambda b, x: b.sub_((x.t() @ x).diagonal().flip(0).cumsum(0)),
    "products of two pairs of dimensions": lambda b, x: b.add_(torch.tensordot(x, x[:, :, None] * x[:, None], ([0, 1], [0, 1]))),
    "a product of a product": lambda b, x: b.add_(torch.addmm(torch.zeros(4, 4, dtype=x.dtype), x.t(), x)[0] @ constants(b)),
    "decayed": lambda b, x: b.mul_(0.9).add_(x.sum(0)),
    "decayed towards sums": lambda b, x: b.lerp_(x.nansum(0), 0.1),
    "decayed twice": lambda b, x: b.lerp_(x.sum(0), 0.1).lerp_(x.square().sum(0), 0.2),
    "decayed beside a number of rows": lambda b, x: b.copy_(0.5 * b + len(x)),
}

AVERAGED: dict[str, Write] = {
    "means": lambda b, x: b.lerp_(x.mean(0), 0.1),
    "a loss": lambda b, x: b.lerp_(F.mse_loss(x, 2 * x).expand(4), 0.1),
    "linear in means": lambda b, x: b.copy_(F.linear(x.sum(0) / len(x), constants(b), b)),
}

# parts do not know of each other's rows, or the result is no sum
WHOLE: dict[str, Write] = {
    "softmax over rows": lambda b, x: b.add_(x.softmax(0).square().sum(0)),
    "sums so far": lambda b, x: b.add_(x.cumsum(0).sum(0)),
    "neighbours": lambda b, x: b.add_((x * x.roll(1, 0)).sum(0)),
    "rows in turn": lambda b, x: b.add_((x * x.flip(0)).sum(0)),
    "rows by rows": lambda b, x: b.add_((x @ x.t()).sum()),
    "pairs of rows": lambda b, x: b.add_((x[:, None] - x).square().sum((0, 1))),
    "normalised over rows": lambda b, x: b.add_(F.batch_norm(x, None, None, training=True).square().sum(0)),
    "numbered rows": lambda b, x: b.add_((torch.arange(len(x))[:, None] * x).sum(0)),
    "beside the number of rows": lambda b, x: b.add_((x + len(x)).sum(0)),
    "mean of selected rows": lambda b, x: b.lerp_(x[x[:, 0] > 0].mean(0), 0.1),
    "a constant beside sums": lambda b, x: b.add_(torch.addmm(constants(b), x.t(), x)[0]),
    "a bias beside sums": lambda b, x: b.add_(torch.ops.aten.linear(x.sum(0), constants(b), bias=b.new_ones(4))),
    "a constant joined to sums": lambda b, x: b.add_(torch.cat([x[:, :2].sum(0), constants(b)[0, :2]])),
    "positions of selected rows": lambda b, x: b.add_(torch.where(x[:, 0] > 0)[0].sum()),
    "as many as pairs of rows": lambda b, x: b.add_(torch.ones(len(x), len(x)).sum()),
    "one more than rows": lambda b, x: b.add_(torch.ones(len(x) + 1).sum()),
    "a multiple of the old value, by a factor of an addition": lambda b, x: b.copy_(torch.add(x.sum(0), b, alpha=2)),
    "decayed by a tensor": lambda b, x: b.lerp_(x.sum(0), b.new_full((4,), 0.1)),
    "variance": lambda b, x: b.lerp_(x.var(0), 0.1),
}


class Written(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write, self.layer = write, nn.Linear(4, 4).double()
        self.register_buffer("b", torch.arange(1.0, 5.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.b, x.detach())
        return self.layer(x)


def squares(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def captured(write: Write) -> ModelGraph:
    return capture(Written(write), (torch.randn(6, 4, dtype=torch.float64),), squares)[0]


def written(write: Write, rows: Tensor) -> Tensor:
    model = Written(write)
    model.write(model.b, rows)
    return model.b  # type: ignore[return-value]


def together(write: Write, parts: Sequence[Tensor], update: Update) -> Tensor:
    """What the parts of a batch write, each from the old value."""
    old, num_rows = Written(write).b, sum(map(len, parts))
    if update.kind == "mean":
        return torch.stack([written(write, part) * len(part) / num_rows for part in parts]).sum(0)
    return update.scale * old + torch.stack([written(write, part) - update.scale * old for part in parts]).sum(0)


def a_few_are_quick(writes: dict[str, Write]) -> list[object]:
    return [name if index % 5 == 1 else slow(name) for index, name in enumerate(writes)]


@pytest.mark.parametrize("name", [*a_few_are_quick(ADDED), *a_few_are_quick(AVERAGED)])
def test_parts_give_what_the_whole_batch_writes(name: str) -> None:
    write = {**ADDED, **AVERAGED}[name]
    update = buffer_updates(captured(write))["b"]
    assert update.kind == ("sum" if name in ADDED else "mean"), update.reason
    rows = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(together(write, rows.split([4, 2, 3]), update), written(write, rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", a_few_are_quick(WHOLE))
def test_what_parts_do_not_give_is_said(name: str) -> None:
    update = buffer_updates(captured(WHOLE[name]))["b"]
    assert update.kind == "whole"
    assert update.reason.endswith("gives neither")
    assert update.where is not None


def test_updates_are_found_once() -> None:
    graph = captured(ADDED["sums"])
    assert buffer_updates(graph) is buffer_updates(graph)
