"""Which values of a flat graph share memory, and which ops write to it: read from the operators' schemas."""

from __future__ import annotations

import operator

from torch import fx


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an op changes in place."""
    return _aliased(node, writes=True)


def viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an op's results may share memory with."""
    return _aliased(node, writes=False)


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


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Per node, the node whose memory it is a view of; itself where it has its own."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        bases = viewed_arguments(node) if node.op == "call_function" else []
        if node.target is operator.getitem:
            bases = node.all_input_nodes
        roots[node] = roots[bases[0]] if bases else node
    return roots
