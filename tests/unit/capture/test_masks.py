"""Masks that no batch decides are told to attention as kernels want them, all others stay; the model and its graph give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from tests.examples import at_most
from whale.capture import capture
from whale.capture.program import CapturedProgram
from whale.ir.precision import Precision

aten = torch.ops.aten
LENGTH = 5
Told = Literal["causal", "none", "mask"]


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _causal(x: Tensor) -> Tensor:
    return _positions(x)[:, None] >= _positions(x)


def _ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, dtype=torch.bool)


def _biased(condition: Tensor, bias: Tensor) -> Tensor:
    return torch.where(condition, bias, -9.0)


def _packed(x: Tensor) -> Tensor:
    """As transformers looks for packed sequences."""
    positions = _positions(x)[None].expand(x.shape[0], -1)
    packed = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    row, places = torch.arange(x.shape[0])[:, None, None, None], _positions(x)
    query, key = places[None, None, :, None], places[None, None, None, :]
    return (key <= query) & (packed[row, query] == packed[row, key])


def _written(x: Tensor) -> Tensor:
    mask = _causal(x)
    mask[0, 1] = True
    return mask


def _written_first(x: Tensor) -> Tensor:
    mask = _ones(x.shape[1], x.shape[1])
    places = mask.view(-1)
    places[1:3] = False
    return mask


MASKS: dict[str, tuple[Told, Callable[[Attention, Tensor], Tensor]]] = {
    "comparison": ("causal", lambda model, x: _causal(x)),
    "triangle": ("causal", lambda model, x: _ones(x.shape[1], x.shape[1]).tril()),
    "per row": ("causal", lambda model, x: _causal(x).expand(x.shape[0], 1, -1, -1)),
    "of rows that are picked": ("causal", lambda model, x: _packed(x)),
    "all": ("none", lambda model, x: _ones(x.shape[1], x.shape[1])),
    "all of each row": ("none", lambda model, x: (_positions(x) >= 0)[None, None, :, None].expand(x.shape[0], -1, -1, x.shape[1])),
    "all that is not left out": ("none", lambda model, x: ~torch.zeros(x.shape[0], 1, 1, x.shape[1], dtype=torch.bool)),
    "zeros": ("none", lambda model, x: torch.zeros(x.shape[1], x.shape[1])),
    "zeros where all holds": ("none", lambda model, x: _biased(_ones(x.shape[0], 1, 1, 5), torch.zeros(1, 1, 5, 5))),
    "of each row": ("mask", lambda model, x: _causal(x) & (torch.arange(x.shape[0]) < 90)[:, None, None, None]),
    "of the number of rows": ("mask", lambda model, x: _causal(x) & torch.full((), x.shape[0] < 90)),
    "all, by the last row": ("mask", lambda model, x: (_positions(x) < torch.arange(x.shape[0])[-1] + 8).expand(LENGTH, LENGTH)),
    "all, by the row": ("mask", lambda model, x: (torch.arange(x.shape[0]) < 6)[:, None, None, None]),
    "all, from a table by the row": ("mask", lambda model, x: (torch.arange(90) < 6)[torch.arange(x.shape[0])][:, None, None, None]),
    "all, by a sum over the rows": ("mask", lambda model, x: (_ones(x.shape[0], x.shape[1]).sum(0) > 3).expand(x.shape[1], -1)),
    "all, by a triangle over the rows": ("mask", lambda model, x: _ones(x.shape[0], x.shape[1]).triu(-3)[:, None, None, :]),
    "all, by a reshape over the rows": (
        "mask",
        lambda model, x: (_positions(x) < 4).expand(x.shape[0], -1).reshape(x.shape[1], -1)[0][:, None, None, None],
    ),
    "shifted": ("mask", lambda model, x: _positions(x)[:, None] >= _positions(x) - 1),
    "window": ("mask", lambda model, x: (_positions(x)[:, None] - _positions(x)).abs() < 2),
    "of a buffer": ("mask", lambda model, x: model.mask),  # type: ignore[return-value]
    "of the batch": ("mask", lambda model, x: _causal(x) & (x.sum((1, 2), keepdim=True) > -1e9)[:, None]),
    "all, of the batch": ("mask", lambda model, x: (x.sum((1, 2), keepdim=True) > -1e9)[:, None]),
    "drawn": ("mask", lambda model, x: torch.rand(x.shape[1], x.shape[1]) < 2.0),
    "floating": ("mask", lambda model, x: torch.zeros(x.shape[1], x.shape[1]).masked_fill(_positions(x)[:, None] < _positions(x), -1e9)),
    "written": ("mask", lambda model, x: _written(x)),
    "written through a view": ("mask", lambda model, x: _written_first(x)),
    "a bias": ("mask", lambda model, x: model.bias),
    "a bias where all holds": ("mask", lambda model, x: _biased(_ones(x.shape[0], 1, 1, 5), model.bias).contiguous()),
    "a bias where it is causal": ("mask", lambda model, x: _biased(_causal(x).expand(x.shape[0], 1, -1, -1), model.bias)),
    "a bias where the batch says": ("mask", lambda model, x: _biased((x.sum(-1) > 0)[:, None, None], model.bias)),
    "a bias that is read otherwise": ("mask", lambda model, x: model.noted(_biased(_ones(x.shape[0], 1, 1, 5), model.bias))),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 12), name
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.bias = nn.Parameter(torch.randn(1, 1, LENGTH, LENGTH))
        self.more: Tensor | float = 0.0

    def noted(self, mask: Tensor) -> Tensor:
        self.more = mask.square().mean((1, 2, 3)).sum()
        return mask

    def forward(self, x: Tensor) -> Tensor:
        self.more = 0.0
        q, k, v = (each[:, None] for each in self.linear(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, MASKS[self.name][1](self, x)).square().sum() + self.more


def attention_of(program: CapturedProgram) -> fx.Node:
    (node,) = program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    return node


def check_equal(model: nn.Module, program: CapturedProgram, *batches: Tensor) -> None:
    """The model and the program give the same loss and gradients."""
    for batch in batches:
        expected: Any = model(batch)
        found = torch.stack(list(program.module()(*program.values(batch).values()))).sum()
        torch.testing.assert_close(found, expected)
        held = list(model.parameters())
        pairs = [torch.autograd.grad(loss, held, allow_unused=True, retain_graph=True) for loss in (found, expected)]
        torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_no_batch_decides_are_told_and_others_stay(name: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(name), torch.randn(4, LENGTH, 4)
    _, program = capture(model, x)
    node = attention_of(program)
    assert {(True, (False,)): "none", (True, (True,)): "causal"}.get((node.args[3] is None, node.args[5:]), "mask") == MASKS[name][0]
    if name != "drawn":
        check_equal(model, program, *(torch.randn(rows, LENGTH, 4) for rows in (4, 2, 7, 11)))


@pytest.mark.parametrize("name", ["a bias where all holds", "a bias where it is causal"])
def test_a_bias_is_not_made_for_each_row_again(name: str) -> None:
    _, program = capture(Attention(name), torch.randn(4, LENGTH, 4))
    mask = attention_of(program).args[3]
    assert isinstance(mask, fx.Node)
    assert mask.meta["val"].shape == (1, 1, LENGTH, LENGTH)


def test_a_mask_stays_for_other_readers() -> None:
    _, program = capture(Attention("a bias that is read otherwise"), torch.randn(4, LENGTH, 4))
    assert program.graph.find_nodes(op="call_function", target=aten.where.ScalarOther)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": _causal,
    "ones": lambda x: _ones(x.shape[1], x.shape[1]),
    "rows": lambda x: _ones(x.shape[0], 1, x.shape[1], x.shape[1]),
    "early rows": lambda x: (torch.arange(x.shape[0]) < 5)[:, None, None, None],
    "early places": lambda x: _positions(x) < 4,
    "diagonal": lambda x: torch.eye(x.shape[1], dtype=torch.bool),
    "batch": lambda x: (x[:, None, None, :, 0] > 0) | torch.eye(x.shape[1], dtype=torch.bool),
    "packed": _packed,
}


class Combined(nn.Module):
    """Attention with a mask of several parts, which all have the diagonal."""

    def __init__(self, parts: list[str], order: list[bool]) -> None:
        super().__init__()
        self.linear, self.parts, self.order = nn.Linear(4, 12), parts, order

    def forward(self, x: Tensor) -> Tensor:
        mask = PARTS[self.parts[0]](x)
        for part, joins in zip(self.parts[1:], self.order, strict=False):
            mask = mask & PARTS[part](x) if joins else mask | PARTS[part](x)
        mask = mask | torch.eye(x.shape[1], dtype=torch.bool)
        q, k, v = (each[:, None] for each in self.linear(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, mask).square().sum()


@at_most(40)
@given(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4), st.lists(st.booleans(), min_size=3, max_size=3))
def test_masks_of_any_parts_give_the_same(parts: list[str], order: list[bool]) -> None:
    torch.manual_seed(0)
    model = Combined(parts, order)
    _, program = capture(model, torch.randn(4, LENGTH, 4))
    check_equal(model, program, *(torch.randn(rows, LENGTH, 4) for rows in (4, 2, 9)))


class Grouped(nn.Module):
    """Attention of 6 heads to 2 key and value heads, which are repeated."""

    def __init__(self, *, repeats: tuple[int, int] = (3, 3), masked: bool = True, dim: int = 2) -> None:
        super().__init__()
        self.query, self.pairs = nn.Linear(4, 12), nn.ModuleList(nn.Linear(4, 12 // repeat) for repeat in repeats)
        self.repeats, self.masked, self.dim = repeats, masked, dim

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.query(x).view(rows, length, 6, 2).transpose(1, 2)
        heads = []
        for layer, repeat in zip(self.pairs, self.repeats, strict=True):
            each = layer(x).view(rows, length, 6 // repeat, 2).transpose(1, 2)
            sizes = [rows, 6 // repeat, length, 2]
            sizes.insert(self.dim, repeat)
            heads.append(each.unsqueeze(self.dim).expand(sizes).reshape(rows, 6, length, 2))
        mask = _causal(x) if self.masked else (x.sum(-1) > -1e9)[:, None, None]
        return F.scaled_dot_product_attention(q, *heads, mask).square().sum()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (Grouped(), True),
        (Grouped(masked=False), False),
        (Grouped(repeats=(3, 2)), False),
        (Grouped(dim=1), False),
        (Grouped(repeats=(1, 1)), False),
    ],
    ids=["with a mask that goes", "with a mask that stays", "keys and values apart", "heads in another order", "nothing repeated"],
)
def test_heads_are_repeated_only_where_the_kernel_takes_no_groups(model: Grouped, groups: bool) -> None:
    _, program = capture(model, torch.randn(4, LENGTH, 4))
    node = attention_of(program)
    assert node.kwargs.get("enable_gqa", False) is groups
    assert isinstance(node.args[1], fx.Node)
    assert (node.args[1].meta["val"].shape[1] == 2) is groups
    check_equal(model, program, *(torch.randn(rows, LENGTH, 4) for rows in (4, 2, 7)))


@pytest.mark.parametrize("name", ["a bias where all holds", "a bias where it is causal"])
def test_casts_of_autocast_do_not_hide_a_mask(name: str) -> None:
    _, program = capture(Attention(name), torch.randn(4, LENGTH, 4), precision=Precision("bfloat16"), device="cpu")
    mask = attention_of(program).args[3]
    assert isinstance(mask, fx.Node)
    assert mask.meta["val"].shape == (1, 1, LENGTH, LENGTH)


def test_casts_of_autocast_do_not_hide_repeated_heads() -> None:
    _, program = capture(Grouped(), torch.randn(4, LENGTH, 4), precision=Precision("bfloat16"), device="cpu")
    node = attention_of(program)
    assert node.kwargs["enable_gqa"]
    assert all(isinstance(each, fx.Node) and each.meta["val"].dtype is torch.bfloat16 for each in node.args[:3])


def test_attention_of_other_keys_keeps_its_mask() -> None:
    class Cross(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each[:, None] for each in self.linear(x).chunk(3, -1))
            mask = torch.ones(3, 5, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q[:, :, 2:], k, v, mask).square().mean()

    _, program = capture(Cross("comparison"), torch.randn(4, 5, 4))
    assert attention_of(program).args[3] is not None


def test_a_mask_over_rows_stays() -> None:
    """Attention of the rows to one another."""

    class OverRows(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each[None, None] for each in self.linear(x[:, 0]).chunk(3, -1))
            rows = torch.arange(x.shape[0])
            apart = rows[:, None] - rows
            return F.scaled_dot_product_attention(q, k, v, (apart >= 0) & (apart < 4)).square().mean()

    _, program = capture(OverRows("comparison"), torch.randn(4, 5, 4))
    assert attention_of(program).args[3] is not None
