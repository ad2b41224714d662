"""Takes a loss apart into terms, each a sum over the rows and a weight, so that pieces of a batch add up to the whole.

Walking back from the loss through sums, constant factors and changes of shape or type:

    0.5 * cross_entropy(x, t) + mse_loss(y, z)
      = 0.5 * [sum of -log p] / [targets that count]  +  1 * [sum of squares] / [elements]

Where memory has been written through a view, the loss reads a copy, which nobody takes apart:

    parts = zeros(2)
    parts[0] = a.mean()         writes parts, which is no argument of the op that reads it
    loss = parts.sum()          parts as it is now: a value of its own
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch.fx import Graph, Node

from whale.capture.flat.aliasing import memory_roots, written_arguments
from whale.capture.loss.facts import BatchFacts, RowFactors, is_scalar
from whale.capture.loss.leaves import Counted, LossPart, NodeBuilder, PerRow
from whale.capture.loss.walk import LossWalk


@dataclass(frozen=True)
class TermNodes:
    """One term of the loss as nodes of the graph: ``coefficient x (sum of sums) / max(sum of weights + offset, minimum)``.

    Attributes:
        coefficient: constant factor.
        sum: makes this piece's sum, a tensor without dimensions.
        weight: makes this piece's weight, a tensor without dimensions or an integer; None for a divisor of 1.
        exact: whether pieces add up to the loss of the whole batch.
        where: the user's op; its ``stack_trace`` holds the line.
        reason: why it is not exact; "" where it is.
        offset: added to the whole batch's weight.
        minimum: least divisor of the whole batch.
    """

    coefficient: float
    sum: Node
    weight: Node | None
    exact: bool
    where: Node
    reason: str
    offset: float = 0.0
    minimum: float | None = None


def split_loss(graph: Graph, loss: Node, weight: Node | None, *, rows: Node | None, row_factors: RowFactors) -> list[TermNodes]:
    """Splits a loss into terms, adding to the graph the ops for their sums and weights.

    The ops of the loss itself stay; those that no term reads are dead afterwards.

    Args:
        graph: flat ATen graph; every node has its example value in ``meta["val"]``.
        loss: the scalar loss, or the sum of a (sum, weight) pair.
        weight: the weight of such a pair.
        rows: the placeholder that holds the number of rows; None in a capture for one number of rows.
        row_factors: per dimension of a node's tensor f > 0 for a size of f x rows, 0 for a constant, -1 for
            anything else; None for what is no tensor.
    """
    reads = LossReads(graph)
    loss, weight = reads.settle(loss), None if weight is None else reads.settle(weight)
    facts = BatchFacts(graph, rows, row_factors)
    walk = LossWalk(facts, rows, reads.settled)
    parts = walk.parts(loss) if weight is None else walk.pair(loss, weight)
    terms = [_emit(part, graph, rows, facts.num_rows) for part in parts]
    for node in walk.passed:
        _take_out_of_place(node)
    return terms


def _emit(part: LossPart, graph: Graph, rows: Node | None, num_rows: int) -> TermNodes:
    build = NodeBuilder(graph, part.leaf)
    total = part.emit_sum(build)
    weight, offset, minimum = None, 0.0, None
    if isinstance(part.divisor, PerRow):
        weight = _count(build, part.divisor.count, num_rows if rows is None else rows)
    elif isinstance(part.divisor, Counted):
        weight, offset, minimum = part.divisor.emit(build), part.divisor.offset, part.divisor.minimum
    return TermNodes(part.coefficient, total, weight, part.exact, part.leaf, part.reason, offset, minimum)


def _count(build: NodeBuilder, per_row: Fraction, rows: Node | int) -> Node:
    """``per_row x rows`` as integer arithmetic; in a capture for one number of rows that number is a constant."""
    count = build.call(operator.mul, rows, per_row.numerator)
    return count if per_row.denominator == 1 else build.call(operator.floordiv, count, per_row.denominator)


def _take_out_of_place(node: Node) -> None:
    """Replaces an in-place op of the taken-apart loss: what it would overwrite is now the sum of a term."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        packet = getattr(torch.ops.aten, target.overloadpacket.__name__.rstrip("_"))
        node.target = getattr(packet, target._overloadname)


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
