"""Gradients of parameters that a split stage shares with another stage of its devices, divided among the devices of the group.

In a split stage the gradient of a whole parameter is complete, and equal, on all devices of the group, so only one of them is
summed. If another stage of the same devices also reads the parameter, both gradients accumulate in one buffer and cannot be
separated; so in the split stage each of t devices gives 1/t of its gradient, and all are summed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from whale.ir.graph import ModelGraph


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.count, None


def divided(value: torch.Tensor, count: int) -> torch.Tensor:
    """The same value; its gradient is divided by `count`."""
    result: torch.Tensor = _Divided.apply(value, count)  # type: ignore[no-untyped-call]
    return result


def divide_gradients(graph: fx.Graph, model: ModelGraph, names: Collection[str], count: int) -> None:
    """Inserts `divided` after the placeholders of some parameters, in place."""
    for node in graph.find_nodes(op="placeholder"):
        op = model.by_name.get(str(node.target))
        if op is None or op.kind != "parameter" or model.parameter_by_name[op.target].name not in names:
            continue
        with graph.inserting_after(node):
            part = graph.call_function(divided, (node, count))
        node.replace_all_uses_with(part, delete_user_cb=lambda user, part=part: user is not part)
