"""Attention over groups of heads: each device repeats what its kernels need repeated, and all compute the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from whale.capture import capture
from whale.ir.precision import Precision
from whale.runtime.program.lowering import StageProgram, lower

GPU, CPU = torch.device("cuda"), torch.device("cpu")
V100, T4, A100 = (7, 0), (7, 5), (8, 0)
LENGTH = 5
aten = torch.ops.aten


class Attention(nn.Module):
    """4 heads to 2 of keys and values."""

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__()
        self.query, self.pairs, self.masked = nn.Linear(4, 8), nn.Linear(4, 8), masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.query(x), *self.pairs(x).chunk(2, -1)))
        mask = (x.sum(-1) > -1e9)[:, None, None] if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=not self.masked, enable_gqa=True).float().square().mean()


def lowered(device: torch.device, capability: tuple[int, int], dtype: str | None, model: nn.Module) -> tuple[StageProgram, Any]:
    torch.manual_seed(0)
    x = torch.randn(3, LENGTH, 4)
    graph, program = capture(model, x, precision=None if dtype is None else Precision(dtype), device="cpu")
    ops = [op.name for op in graph.ops if op.kind == "call"]
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        return lower(program.graph, graph, ops, (), [graph.loss[0].sum], device), program.values(x)


def attention_of(stage: StageProgram) -> fx.Node:
    (node,) = stage.module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    return node


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "masked", "groups"),
    [
        (GPU, A100, "bfloat16", False, True),
        (GPU, A100, "float16", False, True),
        (GPU, A100, None, False, False),
        (GPU, A100, "bfloat16", True, False),
        (GPU, V100, "float16", False, False),
        (GPU, T4, "float16", False, False),
        (CPU, V100, None, True, True),
    ],
)
def test_heads_are_repeated_where_no_fast_kernel_takes_groups(
    device: torch.device, capability: tuple[int, int], dtype: str | None, masked: bool, groups: bool
) -> None:
    node = attention_of(lowered(device, capability, dtype, Attention(masked=masked))[0])
    assert node.kwargs.get("enable_gqa", False) is groups
    sources = [source.target for source in node.args[1:3] if isinstance(source, fx.Node)]
    assert (sources == [aten.repeat_interleave.self_int] * 2) is not groups


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_give_the_same_loss_and_gradients(masked: bool) -> None:
    torch.manual_seed(0)
    model = Attention(masked=masked)
    found = []
    for device in (CPU, GPU):
        stage, values = lowered(device, V100, None, model)
        inputs = [values[name] for name in stage.inputs]
        floating = [each.requires_grad_() for each in inputs if isinstance(each, Tensor)]
        (loss,) = stage.module(*inputs)
        found.append([loss, *torch.autograd.grad(loss, floating)])
    torch.testing.assert_close(*found)
