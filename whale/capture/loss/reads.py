"""What a loss reads where memory has been written through a view: a copy of it, which nobody takes apart.

parts = zeros(2)
parts[0] = a.mean()         writes parts, which is no argument of the op that reads it
loss = parts.sum()          parts as it is now: a value of its own
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from whale.capture.flat.aliasing import memory_roots, written_arguments
from whale.capture.loss.facts import is_scalar

aten = torch.ops.aten


class LossReads:
    """Finds the values of a graph that are written between an op that makes them and one that reads them.

    Args:
        graph: of the loss; changed in place.

    Attributes:
        settled: values that are what they are only because of such writes, and not to be taken apart.
    """

    def __init__(self, graph: Graph) -> None:
        self.settled: set[Node] = set()
        self._graph, self._roots = graph, memory_roots(graph)
        self._position = {node: position for position, node in enumerate(graph.nodes)}
        self._writes: dict[Node, list[int]] = {}
        for node in graph.nodes:
            for base in written_arguments(node):
                self._writes.setdefault(self._roots[base], []).append(self._position[node])

    def settle(self, result: Node) -> Node:
        """A scalar with copies of what was written in place of what it, and the scalars that it is made of, read; itself or a copy."""
        self._settle_sources([result])
        if self._is_written(result, len(self._position)):
            return self._copied(result, next(iter(reversed(self._graph.nodes))))
        return result

    def _settle_sources(self, scalars: Iterable[Node]) -> None:
        pending, seen = list(scalars), set[Node]()
        while pending:
            node = pending.pop()
            if node in seen or node not in self._position:
                continue
            seen.add(node)
            for source in node.all_input_nodes:
                if source in self._position and self._is_written(source, self._position[node]):
                    if source in written_arguments(node):
                        self.settled.add(node)
                    else:
                        node.replace_input_with(source, self._copied(source, node.prev))
                elif is_scalar(source):
                    pending.append(source)

    def _is_written(self, node: Node, before: int) -> bool:
        """Whether its memory is written after it was made, and before a position."""
        places = self._writes.get(self._roots[node], [])
        later = bisect_right(places, self._position[node])
        return later < len(places) and places[later] < before

    def _copied(self, source: Node, behind: Node) -> Node:
        with self._graph.inserting_after(behind):
            made = self._graph.call_function(aten.clone.default, (source,))
        made.meta = {**source.meta, "val": source.meta["val"].clone()}
        self.settled.add(made)
        return made
