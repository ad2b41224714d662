"""Attention masks that hide what comes later and nothing else, told to the kernel instead.

    mask = arange(T)[:, None] >= arange(T)     attention(q, k, v, mask)
                                               attention(q, k, v, is_causal=True)

Libraries that are traced make such masks, where in training they call attention without one; kernels that read a mask are slower, and
the fastest take none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from whale.ir.graph import NUM_ROWS

aten = torch.ops.aten

_MASK, _DROPOUT, _IS_CAUSAL = 3, 4, 5
_LARGEST = 1 << 26
"""Elements of a mask that is looked at."""


def drop_causal_masks(graph: fx.Graph, num_rows: int) -> None:
    """Takes out of attention the masks that are known without a batch and are causal; they become dead code.

    Args:
        graph: changed in place.
        num_rows: of the example.
    """
    known: dict[fx.Node, Any] = {}
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        mask, is_causal = (*node.args, None, 0.0, False)[_MASK], (*node.args[_IS_CAUSAL:], node.kwargs.get("is_causal", False))[0]
        if len(node.args) <= _MASK or not isinstance(mask, fx.Node) or is_causal or not _may_be_causal(node, mask):
            continue
        if mask not in known:
            known[mask] = _is_causal(mask, num_rows)
        if known[mask]:
            dropout = node.args[_DROPOUT] if len(node.args) > _DROPOUT else node.kwargs.get("dropout_p", 0.0)
            node.args = (*node.args[:_MASK], None, dropout, True)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("dropout_p", "is_causal")}


def _may_be_causal(node: fx.Node, mask: fx.Node) -> bool:
    value = mask.meta["val"]
    lengths = [node.args[place].meta["val"].shape[-2] for place in (0, 1)]  # type: ignore[union-attr]
    return value.dtype is torch.bool and value.dim() >= 2 and lengths[0] == lengths[1] == value.shape[-1] == value.shape[-2]


def _is_causal(mask: fx.Node, num_rows: int) -> bool:
    """Whether a mask is made of nothing that a batch or the weights hold, and is causal for each row and head."""
    made_of: set[fx.Node] = set()
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in made_of:
            continue
        made_of.add(node)
        waiting += node.all_input_nodes
    values: dict[fx.Node, Any] = {}
    for node in mask.graph.nodes:
        if node not in made_of:
            continue
        if node.op == "placeholder" and node.target == NUM_ROWS:
            values[node] = num_rows
            continue
        if node.op != "call_function" or _is_unknown(node):
            return False
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        values[node] = node.target(*args, **kwargs)
    value = values[mask]
    causal = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    return bool((value.reshape(-1, *value.shape[-2:]) == causal).all())


def _is_unknown(node: fx.Node) -> bool:
    """Whether an op draws random numbers, writes, or makes what is too large to be looked at."""
    target, value = node.target, node.meta.get("val")
    if isinstance(target, torch._ops.OpOverload) and (torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable):
        return True
    return not isinstance(value, Tensor) or value.numel() > _LARGEST
