"""Which values of a flat graph share memory, and which ops write to it: read from the operators' schemas."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an op changes in place."""
    return _aliased(node, writes=True)


def viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an op's results may share memory with, or do share it with here: some ops return what they got."""
    return [] if _converts(node) else _aliased(node, writes=False) or _shared(node)


def _converts(node: fx.Node) -> bool:
    """Whether the result is of another type and in memory of its own: a schema says of a conversion that it may give back what it got."""
    result, source = (item.meta.get("val") for item in (node, (node.all_input_nodes or [node])[0]))
    if not isinstance(result, Tensor) or not isinstance(source, Tensor):
        return False
    return result.dtype != source.dtype and result.untyped_storage()._cdata != source.untyped_storage()._cdata


def _shared(node: fx.Node) -> list[fx.Node]:
    """The first argument, where the result lies in its memory without a mark of it: a dropout outside training, an einsum that permutes."""
    sources = node.all_input_nodes[:1]
    result, source = (item.meta.get("val") for item in (node, (sources or [node])[0]))
    if not sources or not isinstance(result, Tensor) or not isinstance(source, Tensor):
        return []
    return sources if result.untyped_storage()._cdata == source.untyped_storage()._cdata else []


def _aliased(node: fx.Node, writes: bool) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or (writes and not argument.alias_info.is_write):
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [item for item in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(item, fx.Node)]
    return found


def memory_roots(graph: fx.Graph, *, differentiable: bool = False) -> dict[fx.Node, fx.Node]:
    """Per node, the node whose memory it is a view of; itself where it has its own.

    Args:
        graph: the graph.
        differentiable: whether a detached view counts as memory of its own: a write to it is none that gradients know.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        bases = viewed_arguments(node) if node.op == "call_function" else []
        if differentiable and node.target is torch.ops.aten.detach.default:
            bases = []
        if node.target is operator.getitem:
            bases = node.all_input_nodes
        roots[node] = roots[bases[0]] if bases else node
    return roots
