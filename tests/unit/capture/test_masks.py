"""A mask that is causal whatever the batch is told to attention; all others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.capture import capture

aten = torch.ops.aten


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _causal(x: Tensor) -> Tensor:
    return _positions(x)[:, None] >= _positions(x)


def _packed(x: Tensor) -> Tensor:
    """As transformers looks for packed sequences."""
    packed = torch.zeros(1, x.shape[1], dtype=torch.long).expand(x.shape[0], -1)
    row, places = torch.arange(x.shape[0])[:, None, None, None], _positions(x)
    query, key = places[None, None, :, None], places[None, None, None, :]
    return (key <= query) & (packed[row, query] == packed[row, key])


MASKS: dict[str, tuple[bool, Callable[[Attention, Tensor], Tensor]]] = {
    "comparison": (True, lambda model, x: _positions(x)[:, None] >= _positions(x)),
    "triangle": (True, lambda model, x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()),
    "per row": (True, lambda model, x: (_positions(x)[:, None] >= _positions(x)).expand(x.shape[0], 1, -1, -1)),
    "of rows that are picked": (True, lambda model, x: _packed(x)),
    "of each row": (
        False,
        lambda model, x: (_positions(x)[:, None] >= _positions(x)) & (torch.arange(x.shape[0]) < 90)[:, None, None, None],
    ),
    "of the number of rows": (False, lambda model, x: _causal(x) & torch.full((), x.shape[0] < 90)),
    "shifted": (False, lambda model, x: _positions(x)[:, None] >= _positions(x) - 1),
    "window": (False, lambda model, x: (_positions(x)[:, None] - _positions(x)).abs() < 2),
    "of a buffer": (False, lambda model, x: model.mask),
    "of the batch": (False, lambda model, x: (_positions(x)[:, None] >= _positions(x)) & (x.sum((1, 2), keepdim=True) > -1e9)[:, None]),
    "drawn": (False, lambda model, x: torch.rand(x.shape[1], x.shape[1]) < 2.0),
    "floating": (False, lambda model, x: torch.zeros(x.shape[1], x.shape[1]).masked_fill(_positions(x)[:, None] < _positions(x), -1e9)),
}


class Attention(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 12), name
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each[:, None] for each in self.linear(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, MASKS[self.name][1](self, x)).square().mean()


@pytest.mark.parametrize("name", MASKS)
def test_causal_masks_are_told_and_others_stay(name: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(name), torch.randn(4, 5, 4)
    _, program = capture(model, x)
    (node,) = program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert (node.args[3] is None) is MASKS[name][0]
    assert (node.args[5:] == (True,)) is MASKS[name][0]


def test_attention_of_other_keys_keeps_its_mask() -> None:
    class Cross(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each[:, None] for each in self.linear(x).chunk(3, -1))
            mask = torch.ones(3, 5, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q[:, :, 2:], k, v, mask).square().mean()

    _, program = capture(Cross("comparison"), torch.randn(4, 5, 4))
    (node,) = program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert node.args[3] is not None


def test_a_mask_over_rows_stays() -> None:
    """Attention of the rows to one another."""

    class OverRows(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each[None, None] for each in self.linear(x[:, 0]).chunk(3, -1))
            rows = torch.arange(x.shape[0])
            apart = rows[:, None] - rows
            return F.scaled_dot_product_attention(q, k, v, (apart >= 0) & (apart < 4)).square().mean()

    _, program = capture(OverRows("comparison"), torch.randn(4, 5, 4))
    (node,) = program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert node.args[3] is not None
