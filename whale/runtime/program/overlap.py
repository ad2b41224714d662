"""The pass that computes a split stage's rows in two halves: while one half communicates, the other computes.

    whole     compute ........ reduce ....... compute ........ reduce ....... compute
    first     compute| start           |finish compute  | start          |finish compute
    last             | compute   start |                |finish compute  | start     ...

Each half runs the same ops. Every collective becomes a `start` and a `finish`, between which the other half runs. Autograd runs
nodes in reverse order of creation, so backward mirrors this: the last half first, each collective started at its `finish` and
waited for at its `start`.

Every collective is a gap in one direction or the other. So every gap gets about as much of the other half's work as surrounds it; a
half whose gap is filled goes on, and the other is interrupted:

    work W1 | W2 | W1 | W2 ...  (long and short)        first  W1     W2      W1/2      W1/2 ...
                                                        last      W1/2   W1/2      W2        ...

What does not depend on rows is computed once for both halves. Gradients of parameters add up as usual.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx

from whale.axes.batch import Halving
from whale.ir.graph import ModelGraph
from whale.ir.plan import BatchAxis
from whale.runtime.program.marks import HALF, op_of
from whale.runtime.program.shard.communication import OPERATIONS, finish, start

Place = tuple[int, int, int]
"""(dim, outer, inner): the dimension is outer x rows x inner."""


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        ctx.place = place
        dim, outer, inner = place
        rows = value.shape[dim] // (outer * inner)
        split = _unfolded(value, dim, outer)
        parts = torch.split(split, [first_rows(rows) * inner, last_rows(rows) * inner], dim + 1)
        first, last = (part.flatten(dim, dim + 1) for part in parts)
        # No views for autograd, so that in-place ops of the model may follow; contiguous like the whole, so that views may.
        is_dense = dim == 0 and outer == 1
        return (first.detach(), last.detach()) if is_dense else (first.clone(), last.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return joined(gradients[0], gradients[1], ctx.place), None


def halves(value: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """The first and the last rows of a tensor; the first half of an odd number has one more."""
    found: tuple[Tensor, Tensor] = _Halves.apply(value, place)  # type: ignore[no-untyped-call]
    return found


def joined(first: Tensor, last: Tensor, place: Place) -> Tensor:
    """The inverse of `halves`."""
    dim, outer, _ = place
    if outer == 1:
        return torch.cat([first, last], dim)
    return torch.cat([_unfolded(half, dim, outer) for half in (first, last)], dim + 1).flatten(dim, dim + 1)


def _unfolded(value: Tensor, dim: int, outer: int) -> Tensor:
    """The dimension as two: ``outer`` and the rest."""
    return value.reshape(*value.shape[:dim], outer, value.shape[dim] // outer, *value.shape[dim + 1 :])


def first_rows(num_rows: int) -> int:
    return num_rows - num_rows // 2


def last_rows(num_rows: int) -> int:
    return num_rows // 2


Operation = Callable[..., Tensor]

HALVES = ("first", "last")

FLOPS_PER_BYTE = 20
"""Roughly what a device computes while it moves a byte; compares the work of different ops."""


class _Step(NamedTuple):
    """What each half does once."""

    kind: Literal["compute", "start", "finish"]
    node: fx.Node
    work: float


def overlap(graph: fx.Graph, model: ModelGraph, halving: Halving, outputs: Sequence[str]) -> fx.Graph:
    """Rewrites a stage's graph so that its two halves alternate.

    Args:
        graph: of the stage, cut, its nodes marked; not changed.
        outputs: names of the graph's results.

    Returns:
        A graph with the same placeholders and results, its nodes marked with their half.
    """
    writer = _Writer(graph, halving)
    chunks = _chunks(_steps(graph, model, writer.rows))
    for half, step in _in_turns(chunks):
        writer.write(half, step)
    (results,) = next(node for node in graph.nodes if node.op == "output").args
    writer.write_results(outputs, cast("Sequence[fx.Node]", results))
    writer.graph.lint()
    return writer.graph


def _steps(graph: fx.Graph, model: ModelGraph, rows: Collection[fx.Node]) -> list[_Step]:
    """What each half does, in order; a collective is finished before its first user, or before anything is written in place."""
    steps: list[_Step] = []
    started: list[fx.Node] = []
    work = _works(graph, model)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if started and (node.op == "output" or _writes(node) or not set(started).isdisjoint(node.all_input_nodes)):
            steps += [_Step("finish", other, 0) for other in started]
            started.clear()
        if node.op == "output":
            continue
        if node in rows and node.target in OPERATIONS:
            steps.append(_Step("start", node, 0))
            started.append(node)
        else:
            steps.append(_Step("compute", node, work.get(node, 0) if node in rows else 0))
    return steps


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _works(graph: fx.Graph, model: ModelGraph) -> dict[fx.Node, float]:
    """The work of each op, attributed to the first of its nodes."""
    first: dict[str, fx.Node] = {}
    for node in graph.nodes:
        name = op_of(node)
        if name is not None and node.target not in OPERATIONS:
            first.setdefault(name, node)
    ops = {node: model.by_name[name] for name, node in first.items()}
    return {node: 0 if "view" in op.tags else op.forward_flops + FLOPS_PER_BYTE * op.num_bytes for node, op in ops.items()}


def _chunks(steps: Sequence[_Step]) -> list[list[_Step]]:
    """The steps between the gaps: each chunk except the first begins with at least one finish."""
    found: list[list[_Step]] = [[]]
    for index, step in enumerate(steps):
        if step.kind == "finish" and steps[index - 1].kind != "finish":
            found.append([])
        found[-1].append(step)
    return found


@dataclass
class _Half:
    """Progress of one half."""

    chunk: int = 0  # with `step`: what runs next
    step: int = 0
    gap: float | None = None  # work that the other half still has to do before this one goes on; None if it may go on at once


def _in_turns(chunks: Sequence[Sequence[_Step]]) -> list[tuple[int, _Step]]:
    """All steps of both halves, in the order in which they run."""
    work = [sum(step.work for step in chunk) for chunk in chunks]
    both, order, turn = (_Half(), _Half()), list[tuple[int, _Step]](), 0
    while len(order) < 2 * sum(map(len, chunks)):
        own, other = both[turn], both[1 - turn]
        step = chunks[own.chunk][own.step] if own.chunk < len(chunks) else None
        own.gap = None
        if step is None or (other.gap is not None and other.gap < step.work / 2):
            turn = 1 - turn
            continue
        order.append((turn, step))
        other.gap = None if other.gap is None else other.gap - step.work
        own.step += 1
        if own.step == len(chunks[own.chunk]):
            own.chunk, own.step = own.chunk + 1, 0
            if own.chunk < len(chunks):
                own.gap = (work[own.chunk - 1] + work[own.chunk]) / 2
            turn = 1 - turn
    return order


class _Writer:
    """Builds the new graph.

    Attributes:
        rows: old nodes of which each half has its own.
    """

    def __init__(self, graph: fx.Graph, halving: Halving) -> None:
        self.graph = fx.Graph()
        self.rows: set[fx.Node] = set()
        self._halving = halving
        self._copies: tuple[dict[fx.Node, fx.Node], ...] = ({}, {})
        self._on_their_way: tuple[dict[fx.Node, fx.Node], ...] = ({}, {})
        given = [node for node in graph.nodes if node.op == "placeholder"]
        whole = {node: self.graph.node_copy(node) for node in given}
        for node in given:
            self._copies[0][node], self._copies[1][node] = self._divided(node, whole[node])
        for node in graph.nodes:
            if (node in whole and node.target in halving.rows) or not self.rows.isdisjoint(node.all_input_nodes):
                self.rows.add(node)

    def _divided(self, node: fx.Node, whole: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The halves of a placeholder."""
        name = str(node.target)
        if name not in self._halving.rows:
            return whole, whole
        if name not in self._halving.read:  # the number of rows
            return self._half(node, 0, first_rows, (whole,)), self._half(node, 1, last_rows, (whole,))
        both = self.graph.create_node("call_function", halves, (whole, _place(self._halving.read[name])), name=f"{name}_halves")
        return self._half(node, 0, operator.getitem, (both, 0)), self._half(node, 1, operator.getitem, (both, 1))

    def write(self, half: int, step: _Step) -> None:
        """Writes a step of one half; a common node only once."""
        node, copies = step.node, self._copies[half]
        if node not in self.rows:
            if node not in copies:
                self._copies[0][node] = self._copies[1][node] = self.graph.node_copy(node, copies.__getitem__)
            return
        arguments = fx.node.map_arg(node.args, copies.__getitem__)
        if step.kind == "start":
            made = self._half(node, half, start, (OPERATIONS[cast("Operation", node.target)], *arguments), "_start")
            self._on_their_way[half][node] = made
        elif step.kind == "finish":
            copies[node] = self._half(node, half, finish, (self._on_their_way[half][node],))
        else:
            keywords = fx.node.map_arg(node.kwargs, copies.__getitem__)
            copies[node] = self._half(node, half, node.target, arguments, keywords=keywords)

    def _half(
        self, node: fx.Node, half: int, target: Any, arguments: tuple[Any, ...], end: str = "", keywords: dict[str, Any] | None = None
    ) -> fx.Node:
        """A call that computes an old node for one half."""
        made = self.graph.create_node("call_function", target, arguments, keywords or {}, name=f"{node.name}_{HALVES[half]}{end}")
        made.meta = {**node.meta, HALF: half}
        return made

    def write_results(self, names: Sequence[str], nodes: Sequence[fx.Node]) -> None:
        """Writes the results: halves joined, or added."""
        self.graph.output(tuple(self._whole(name, node) for name, node in zip(names, nodes, strict=True)))

    def _whole(self, name: str, node: fx.Node) -> fx.Node:
        first, last = (copies[node] for copies in self._copies)
        if node not in self.rows:
            return first
        if name in self._halving.added:
            return self.graph.create_node("call_function", operator.add, (first, last), name=f"{node.name}_added")
        arguments = (first, last, _place(self._halving.joined[name]))
        return self.graph.create_node("call_function", joined, arguments, name=f"{node.name}_joined")


def _place(axis: BatchAxis) -> Place:
    return axis.dim, axis.outer, axis.inner
