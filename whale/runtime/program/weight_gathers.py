"""Gathered weights that exist only around the ops that read them: a stage's program gathers them before, and frees them after.

    forward    gather(w)  y = linear(x, w)  free(w)
    backward   before the backward node of the last reader: gather; once the gradient of what the first one reads is complete: free

A segment that is recomputed gathers like any other op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from whale.ir.graph import ModelGraph
from whale.runtime.program.marks import OP, op_of

Numbers = tuple[int, ...]
"""Numbers of buckets of weights."""

_number_of_next_node = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_OF_LEAVES = 2**64 - 1
"""Sequence number of AccumulateGrad nodes."""


class WeightSource(Protocol):
    """Gathers buckets of weights, and frees them."""

    def need(self, numbers: Iterable[int]) -> None:
        """Gathers those that are not there."""

    def free(self, numbers: Iterable[int], *, backward: bool) -> None:
        """Frees them, in a pass of this direction."""


def gather_forward(weights: WeightSource, numbers: Numbers) -> int:
    """Before an op reads them; returns the sequence number of the next autograd node."""
    weights.need(numbers)
    number: int = _number_of_next_node()
    return number


def gather_backward(weights: WeightSource, numbers: Numbers, start: int, results: Any) -> None:
    """After an op that reads them: gathers them before each node of its backward pass, since later writes may replace some nodes."""
    pending, seen = list(_nodes(results)), set[Any]()
    while pending:
        node = pending.pop()
        if node not in seen and start <= node._sequence_nr() < _OF_LEAVES:
            seen.add(node)
            node.register_prehook(lambda _: weights.need(numbers))
            pending += [source for source, _ in node.next_functions if source is not None]


def free_forward(weights: WeightSource, numbers: Numbers) -> None:
    """After the last op that reads them."""
    weights.free(numbers, backward=False)


def free_backward(weights: WeightSource, numbers: Numbers, operands: Any) -> None:
    """Before the first op that reads them: once the gradients of its operands are complete, all readers are done."""
    for node in _nodes(operands):
        node.register_prehook(lambda _: weights.free(numbers, backward=True))


def _nodes(values: Any) -> set[Any]:
    return {value.grad_fn for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.grad_fn is not None}


def insert_gathers(graph: fx.Graph, model: ModelGraph, numbers: Mapping[str, Numbers], weights: fx.Node) -> None:
    """Inserts the calls that gather and free weights into a stage's graph.

    Args:
        graph: of the stage, its nodes marked with their op's name; changed in place.
        numbers: per gathered parameter, its buckets.
        weights: the placeholder of the `WeightSource`.
    """
    sources = {node: own for node in graph.find_nodes(op="placeholder") if (own := _numbers_of(node, model, numbers))}
    _copy_returned(graph, model, sources)
    views, readers, computing = dict(sources), dict[int, list[fx.Node]](), dict[int, fx.Node]()
    for node in list(graph.nodes):
        own = tuple(sorted({number for source in node.all_input_nodes for number in views.get(source, ())}))
        if node.op != "call_function" or not own:
            continue
        is_view = _is_view(node)
        if is_view or _may_be_view(node, model):
            views[node] = own
        for number in own:
            readers.setdefault(number, []).append(node)
            if not is_view:
                computing.setdefault(number, node)
        with graph.inserting_before(node):
            start = graph.call_function(gather_forward, (weights, own))
        _marked(start, node)
        if is_view:  # its backward reads no weight, and may be later than that of all readers
            continue
        with graph.inserting_after(node):
            again = graph.call_function(gather_backward, (weights, own, start, node))
        _marked(again, node)
    for number, own_readers in readers.items():
        behind = own_readers[-1]
        with graph.inserting_after(behind if _is_view(behind) else behind.next):  # after the `gather_backward` of the node
            graph.call_function(free_forward, (weights, (number,)))
        if (first := computing.get(number)) is not None:
            operands = tuple(source for source in first.all_input_nodes if source not in views)
            with graph.inserting_before(first):
                _marked(graph.call_function(free_backward, (weights, (number,), operands)), first)


def _copy_returned(graph: fx.Graph, model: ModelGraph, sources: Iterable[fx.Node]) -> None:
    """Copies results that share memory with weights: they are read when the weights are gone."""
    views, output = set(sources), graph.output_node()
    for node in list(graph.nodes):
        is_view = node.op == "call_function" and (_is_view(node) or _may_be_view(node, model))
        if is_view and not views.isdisjoint(node.all_input_nodes):
            views.add(node)
            if output in node.users:
                with graph.inserting_after(node):
                    copy = graph.call_function(torch.ops.aten.clone.default, (node,))
                copy.meta |= node.meta
                output.replace_input_with(node, copy)


def insert_waits(graph: fx.Graph, model: ModelGraph, numbers: Mapping[str, Numbers], weights: fx.Node) -> None:
    """Inserts waits for buckets of weights that stay, before the first node that reads each; arguments as in `insert_gathers`."""
    sources, there = {node: _numbers_of(node, model, numbers) for node in graph.find_nodes(op="placeholder")}, set[int]()
    for node in list(graph.nodes):
        own = {number for source in node.all_input_nodes for number in sources.get(source, ())} - there
        if node.op == "call_function" and own:
            there |= own
            with graph.inserting_before(node):
                _marked(graph.call_function(gather_forward, (weights, tuple(sorted(own)))), node)


def _numbers_of(node: fx.Node, model: ModelGraph, numbers: Mapping[str, Numbers]) -> Numbers:
    op = model.by_name.get(str(node.target))
    if op is None or op.kind != "parameter":
        return ()
    return numbers.get(model.parameter_by_name[op.target].name, ())


def _is_view(node: fx.Node) -> bool:
    """Whether the schema says that a node returns a view."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.returns:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _may_be_view(node: fx.Node, model: ModelGraph) -> bool:
    """Whether a node's result may share memory with what it reads, or not exist yet: both are possible for nodes added by lowering."""
    name = op_of(node)
    return name is None or model.storage[name] != name or not isinstance(node.target, torch._ops.OpOverload)


def _marked(made: fx.Node, node: fx.Node) -> None:
    """Marks a new node with the op of another, so that both go into the same segment."""
    if (name := op_of(node)) is not None:
        made.meta[OP] = name
