"""Splits a loss into terms, each a sum over the rows and a weight, so that pieces of a batch add up to the whole.

Walking back from the loss through sums, constant factors and changes of shape or type:

    0.5 * cross_entropy(x, t) + mse_loss(y, z)
      = 0.5 * [sum of -log p] / [targets that count]  +  1 * [sum of squares] / [elements]

If memory has been written through a view, the loss reads a copy, which is not split:

    parts = zeros(2)
    parts[0] = a.mean()         writes parts, which is no argument of the op that reads it
    loss = parts.sum()          the current value of parts: a leaf
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

import torch
from torch.fx import Graph, Node

from whale.capture.flat.aliasing import memory_roots, written_arguments
from whale.capture.loss.facts import BatchFacts, RowFactors, is_scalar
from whale.capture.loss.leaves import Counted, LossPart, NodeBuilder, PerRow
from whale.capture.loss.walk import LossWalk
from whale.capture.source import line_of
from whale.errors import CaptureError


@dataclass(frozen=True)
class TermNodes:
    """One term of the loss as nodes of the graph: ``coefficient x (sum of sums) / max(sum of weights + offset, minimum)``."""

    coefficient: float
    sum: Node  # this piece's sum, a tensor without dimensions
    weight: Node | None  # this piece's weight, a tensor without dimensions or an integer; None for a divisor of 1
    where: Node  # the user's op; its ``stack_trace`` holds the line
    reason: str  # why pieces do not add up to the loss of the whole batch; "" if they do
    offset: float = 0.0  # added to the whole batch's weight
    minimum: float | None = None  # least divisor of the whole batch
    metric: str = ""  # the metric that it is a term of; "" for the loss


def split_loss(
    graph: Graph,
    loss: Node,
    weight: Node | None,
    metrics: Mapping[str, Node] = MappingProxyType({}),
    *,
    rows: Node | None,
    row_factors: RowFactors,
) -> list[TermNodes]:
    """Splits a loss, and metrics of the same pass, into terms and adds the ops for their sums and weights to the graph.

    The ops of the loss itself stay; those that no term reads are dead afterwards.

    Args:
        graph: flat ATen graph; every node has its example value in ``meta["val"]``.
        loss: the scalar loss, or the sum of a (sum, weight) pair.
        weight: the weight of such a pair.
        metrics: scalars by name.
        rows: the placeholder that holds the number of rows; None in a capture for one number of rows.
        row_factors: as for `BatchFacts`; None for what is no tensor.
    """
    reads = LossReads(graph)
    loss, weight = reads.settle(loss), None if weight is None else reads.settle(weight)
    scalars = {name: reads.settle(node) for name, node in metrics.items()}
    facts = BatchFacts(graph, rows, row_factors)
    walk = LossWalk(facts, rows, reads.settled)
    parts = walk.parts(loss) if weight is None else walk.pair(loss, weight)
    built: dict[tuple[object, ...], Node] = {}
    terms = [_emit(part, graph, rows, facts.num_rows, built) for part in parts]
    for name, node in scalars.items():
        for part in walk.parts(node):
            term = _emit(part, graph, rows, facts.num_rows, built)
            own = NodeBuilder(graph, term.sum, built).call(aten.alias.default, term.sum)  # other stages may make what it is of too
            terms.append(replace(term, sum=own, metric=name))
    for node in walk.passed:
        _take_out_of_place(node, reads)
    return terms


def _emit(part: LossPart, graph: Graph, rows: Node | None, num_rows: int, built: dict[tuple[object, ...], Node]) -> TermNodes:
    build = NodeBuilder(graph, part.leaf, built)
    total = part.emit_sum(build)
    weight, offset, minimum = None, 0.0, None
    if isinstance(part.divisor, PerRow):
        weight = _count(build, part.divisor.count, num_rows if rows is None else rows)
    elif isinstance(part.divisor, Counted):
        weight, offset, minimum = part.divisor.emit(build), part.divisor.offset, part.divisor.minimum
    return TermNodes(part.coefficient, total, weight, part.leaf, part.reason, offset, minimum)


def _count(build: NodeBuilder, per_row: Fraction, rows: Node | int) -> Node:
    """``per_row x rows`` in integer arithmetic."""
    count = build.call(operator.mul, rows, per_row.numerator)
    return count if per_row.denominator == 1 else build.call(operator.floordiv, count, per_row.denominator)


def _take_out_of_place(node: Node, reads: LossReads) -> None:
    """Makes an in-place op of the split loss functional: what it would overwrite is now the sum of a term."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        if any(reads.is_copied(base) for base in written_arguments(node)):
            raise CaptureError(
                f"a loss is written in place by {target}, and a value that shares its memory is read after that",
                where=line_of(node),
                hint="loss = loss + other, in place of loss += other",
            )
        packet = getattr(torch.ops.aten, target.overloadpacket.__name__.rstrip("_"))
        node.target = getattr(packet, target._overloadname)


aten = torch.ops.aten


class LossReads:
    """Finds values that are written between the op that makes them and one that reads them; changes the graph in place."""

    def __init__(self, graph: Graph) -> None:
        self.settled: set[Node] = set()  # values that depend on such writes, and are not to be split
        self._graph, self._roots = graph, memory_roots(graph)
        self._position = {node: position for position, node in enumerate(graph.nodes)}
        self._writes: dict[Node, list[int]] = {}
        self._copied_roots: set[Node] = set()
        for node in graph.nodes:
            for base in written_arguments(node):
                self._writes.setdefault(self._roots[base], []).append(self._position[node])

    def is_copied(self, node: Node) -> bool:
        """Whether something that shares memory with a node was copied."""
        return self._roots[node] in self._copied_roots

    def settle(self, result: Node) -> Node:
        """The scalar (or a copy of it), with reads of written memory on the way to it replaced by reads of copies."""
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
        self._copied_roots.add(self._roots[source])
        return made
