"""A parameter that a split stage shares with another stage of its devices: its gradient is given in equal parts.

In a split stage the gradient of a whole parameter is complete, and the same, on all devices of the group, so one of
them answers for it. Where the same devices run another stage that reads the parameter, both gradients lie in one sum and
cannot be told apart; so the split stage gives each device a t-th of its gradient, and all are added.
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
    """The value as it is; its gradient divided."""
    result: torch.Tensor = _Divided.apply(value, count)  # type: ignore[no-untyped-call]
    return result


def divide_gradients(graph: fx.Graph, model: ModelGraph, names: Collection[str], count: int) -> None:
    """Puts `divided` behind the placeholders of some parameters, in place."""
    for node in graph.find_nodes(op="placeholder"):
        op = model.by_name.get(str(node.target))
        if op is None or op.kind != "parameter" or model.parameter_by_name[op.target].name not in names:
            continue
        with graph.inserting_after(node):
            part = graph.call_function(divided, (node, count))
        node.replace_all_uses_with(part, delete_user_cb=lambda user, part=part: user is not part)
