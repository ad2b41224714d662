"""What in a flat graph must stay: dead code goes, in-place ops on buffers and on live values do not; needless detaches go."""

from __future__ import annotations

import torch
from torch import fx

from whale.capture.exporting.ways import held
from whale.capture.flat.aliasing import memory_roots, written_arguments
from whale.capture.flat.gradients import gradient_flow

aten = torch.ops.aten


def remove_dead_code(graph: fx.Graph, keep: frozenset[str] = frozenset()) -> None:
    """Removes what the output does not need.

    An in-place op is needed if it writes to a placeholder in `keep` (a buffer), or to memory that a needed op reads; so is what checks
    the way that the model takes.
    """
    live = _live(graph, keep)
    for node in reversed(list(graph.nodes)):
        if node not in live and node.op != "output":
            graph.erase_node(node)


def _live(graph: fx.Graph, keep: frozenset[str]) -> set[fx.Node]:
    roots = memory_roots(graph)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for written in written_arguments(node):
            writers.setdefault(roots[written], []).append(node)
    pending = [node for node in graph.nodes if node.op == "output" or node.target is held]
    pending += [node for root, nodes in writers.items() if root.op == "placeholder" and root.name in keep for node in nodes]
    live: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in live:
            continue
        live.add(node)
        pending += [*node.all_input_nodes, *writers.get(roots[node], [])]
    return live


def drop_needless_detaches(graph: fx.Graph) -> None:
    """Takes out detaches of what has no gradient anyway, as inlined `no_grad` regions have them."""
    flow = gradient_flow(graph)
    for node in list(graph.nodes):
        if node.target is aten.detach.default and not flow[node.args[0]]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
