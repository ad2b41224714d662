"""Outputs that need the batch whole: their last ops run once, on values that are gathered from all pieces of the batch.

    h [b d] -> slice [b-1 d]        an output    gathered: h
    h [b d] -> gt [b d] -> sum []   an output    gathered: gt

The graph returns what is gathered in place of such an output. Outputs stay as they are (`whale.axes.mixing` warns of them) where these
ops write, draw random numbers, decide what is computed, or read matrices of parameters: then they are more than an end of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from whale.axes import batch_axes, discover
from whale.capture.exporting.reads import held
from whale.capture.flat.aliasing import ancestors, memory_roots, written_arguments
from whale.capture.flat.flatten import Flat
from whale.capture.program import WholeOutputs
from whale.ir.graph import ModelGraph
from whale.ir.plan import BatchAxis


def cut_whole_outputs(flat: Flat, model: ModelGraph, num_terms: int) -> WholeOutputs | None:
    """Takes the last ops of outputs that need the batch whole off a graph, whose first `num_terms` results are of the loss.

    The graph then returns the results of the loss, and what is to be gathered. None, and nothing changes, where there are no such outputs.
    """
    returned: list[fx.Node] = list(flat.graph.output_node().args[0])  # type: ignore[arg-type]
    terms, outputs = returned[:num_terms], returned[num_terms:]
    axes = discover(replace(model, loss=()))
    places = batch_axes(model, axes)
    seeds = {mixing.op for mixing in axes.mixing}
    seeds |= {node.name for node in outputs if node.name not in places and _varies(model, node)}
    ends = _Ends(flat, model, places, seeds) if seeds else None
    tails = {node: ends.of(node) for node in outputs} if ends is not None else {}
    tail = {node for nodes in tails.values() for node in nodes or ()}
    if not tail:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    read = {source: None for node in flat.graph.nodes if node in tail for source in node.all_input_nodes if source not in tail}
    read |= {node: None for node in outputs if node not in tail}
    for node in read:
        copies[node] = graph.placeholder(node.name)
    for node in flat.graph.nodes:
        if node in tail:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    gathered = {node: _as_op(flat, node) for node in read if flat.kinds.get(node.name) != "constant" and node is not flat.rows}
    flat.graph.erase_node(flat.graph.output_node())
    flat.graph.output((*terms, *gathered.values()))
    in_rows = {place: node.name for place, node in enumerate(outputs) if node not in tail}
    own_places = {place: places[node.name] for place, node in enumerate(outputs) if node in tail and node.name in places}
    return WholeOutputs(graph, tuple(gathered.get(node, node).name for node in read), in_rows, own_places)


def _as_op(flat: Flat, node: fx.Node) -> fx.Node:
    """An op with the value of a placeholder: only ops have a place in a plan."""
    if node.op != "placeholder":
        return node
    with flat.graph.inserting_before(flat.graph.output_node()):
        made = flat.graph.call_function(torch.ops.aten.alias.default, (node,))
    made.meta["val"] = node.meta["val"]
    return made


class _Ends:
    """The ops between those that mix samples and an output."""

    def __init__(self, flat: Flat, model: ModelGraph, places: Mapping[str, BatchAxis], seeds: set[str]) -> None:
        self._flat, self._model, self._places, self._seeds = flat, model, places, seeds
        self._roots = memory_roots(flat.graph)
        self._writes = [(node, {self._roots[base] for base in written_arguments(node)}) for node in flat.graph.nodes]
        self._free: set[fx.Node] = {flat.rows}  # what the number of rows and constants alone give
        for node in flat.graph.nodes:
            sources = node.all_input_nodes
            is_free = flat.kinds.get(node.name) == "constant" if node.op == "placeholder" else all(each in self._free for each in sources)
            if is_free:
                self._free.add(node)

    def of(self, output: fx.Node) -> set[fx.Node] | None:
        """The ops that give an output from gathered values; empty where it has rows of its own, None where they are not taken off."""
        made_of = ancestors(output)
        order = [node for node in self._flat.graph.nodes if node in made_of and node.op == "call_function"]
        found: set[fx.Node] = set()
        for node in order:
            if node.name in self._seeds or any(source in found or _is_seed(source, self._seeds) for source in node.all_input_nodes):
                found.add(node)
        if output not in found:
            return set()
        for node in reversed(order):
            if node not in found and not found.isdisjoint(node.users) and not self._can_be_gathered(node):
                found.add(node)
        return found if self._is_an_end(order, found) else None

    def _can_be_gathered(self, node: fx.Node) -> bool:
        if node in self._free or not isinstance(node.meta.get("val"), Tensor):
            return False
        return node.name in self._places or not _varies(self._model, node)

    def _is_an_end(self, order: Sequence[fx.Node], found: set[fx.Node]) -> bool:
        read = {source for node in found for source in node.all_input_nodes if source not in found}
        if any(node.target is held or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in found):
            return False
        if any(self._flat.kinds.get(node.name) in ("parameter", "buffer") and node.meta["val"].dim() > 1 for node in read):
            return False
        before = set().union(*map(ancestors, read)) if read else set()
        memory = {self._roots[node] for node in (*read, *found)}
        return not any(written & memory for node, written in self._writes if node not in before)


def _varies(model: ModelGraph, node: fx.Node) -> bool:
    """Whether the size of a tensor depends on the rows, or on values in them."""
    return any(model.by_name[node.name].outputs[0].row_factors)


def _is_seed(node: fx.Node, seeds: set[str]) -> bool:
    return node.op == "placeholder" and node.name in seeds
