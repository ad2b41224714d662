"""Replaces causal attention masks by the kernel's ``is_causal``.

    mask = arange(T)[:, None] >= arange(T)     attention(q, k, v, mask)
                                               attention(q, k, v, is_causal=True)

Some libraries make such masks only when they are traced; kernels that read a mask are slower, and the fastest take none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from whale.capture.flat.aliasing import ancestors
from whale.capture.flat.sizes import hint_of
from whale.ir.graph import NUM_ROWS

aten = torch.ops.aten

_MASK, _DROPOUT, _IS_CAUSAL = 3, 4, 5
_COUNTS = (aten.arange.default, aten.arange.start)
_VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default, aten.alias.default, aten.slice.Tensor)
_LARGEST = 1 << 26  # elements of a mask that is examined


def drop_causal_masks(graph: fx.Graph, num_rows: int) -> None:
    """Removes causal masks that are known without a batch from attention, in place; they become dead code."""
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
    is_square = value.dim() >= 2 and all(isinstance(length, int) for length in (*lengths, *value.shape[-2:]))
    return value.dtype is torch.bool and is_square and lengths[0] == lengths[1] == value.shape[-1] == value.shape[-2]


def _is_causal(mask: fx.Node, num_rows: int) -> bool:
    """Whether a mask depends on no batch or weights, is the same for all rows and heads, and is causal."""
    made_of = ancestors(mask)
    if not _is_alike_in_rows([node for node in mask.graph.nodes if node in made_of]):
        return False
    values: dict[fx.Node, Any] = {}
    try:
        for node in mask.graph.nodes:
            if node in made_of:
                values[node] = num_rows if node.op == "placeholder" else _on_host(node, values)
        value = values[mask]
        causal = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
        return bool((value.reshape(-1, *value.shape[-2:]) == causal).all())
    except Exception:  # what cannot be computed here is not known
        return False


def _on_host(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_alike_in_rows(nodes: list[fx.Node]) -> bool:
    """Whether values made from nothing but the number of rows are the same for each row, for any number.

    The number itself may be a size. A range over the rows may index equal rows, as in code that looks for packed sequences.
    """
    counts = set[fx.Node]()
    for node in nodes:
        if node.op == "placeholder":
            if node.target != NUM_ROWS:
                return False
            continue
        if node.op != "call_function" or _is_unknown(node):
            return False
        if not isinstance(node.meta["val"], Tensor):
            continue  # a size
        if any(isinstance(argument, fx.Node) and not isinstance(argument.meta["val"], Tensor) for argument in node.args):
            if node.target not in _COUNTS:
                return False
            counts.add(node)
        read = counts.intersection(node.all_input_nodes)
        if read and node.target in _VIEWS:
            counts.add(node)
        elif read and (node.target is not aten.index.Tensor or node.args[0] in counts):
            return False
    return True


def _is_unknown(node: fx.Node) -> bool:
    """Whether an op draws random numbers, writes, or makes too large a tensor."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(value, Tensor):
        return not isinstance(value, (int, torch.SymInt))
    if isinstance(target, torch._ops.OpOverload) and (torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable):
        return True
    return bool(hint_of(value.numel()) > _LARGEST)
