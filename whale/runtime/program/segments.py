"""Recomputed segments of a stage: they save only their inputs, by `torch.utils.checkpoint`.

    inputs --> [ op op op op ] --> outputs          forward: what the ops save for backward is dropped
                 |  |  |  |
    inputs --> [ op op op op ]                      backward: recomputed, used, dropped

Deferred weight gradients are queued once: the backward pass fills the queue, not the recomputed forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from whale.runtime.program.marks import op_of
from whale.runtime.program.watch import NOBODY, Watch

Rewrite = Callable[[fx.Graph, nn.Module, Collection[str]], None]
"""Takes a graph, which it changes, a module that gets the graph's new submodules, and the names of random ops."""


class Recomputed(nn.Module):
    """A run of ops that is recomputed in the backward pass.

    Args:
        module: returns a tuple.
        is_random: whether it draws random numbers, which are then equal both times.
        watch: called each time that it is computed.
        stops_early: whether recomputation stops after the last saved tensor, by an exception, which compiled runs do not let through.
    """

    def __init__(self, module: fx.GraphModule, *, is_random: bool, name: str, watch: Watch, stops_early: bool) -> None:
        super().__init__()
        self.module, self.is_random, self._stops_early = module, is_random, stops_early
        self._name, self._watch = name, watch

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(self._compute, *inputs, use_reentrant=False, preserve_rng_state=self.is_random, early_stop=self._stops_early)

    def _compute(self, *inputs: Any) -> Any:
        with self._watch.segment(self._name):
            return self.module(*inputs)


def with_segments(
    graph: fx.Graph,  # of the stage, its nodes marked with their op's name (`OP`); changed in place
    segments: Sequence[Sequence[str]],  # names of the ops of each run
    random: Collection[str],  # ops that draw random numbers
    watch: Watch = NOBODY,  # called when each segment is computed
    rewrite: Rewrite | None = None,  # compiles runs in each segment, and in the rest; None for none
) -> fx.GraphModule:
    """A module that runs a stage's graph with these segments recomputed."""
    root = nn.Module()
    for number, segment in enumerate(segments):
        names = set(segment)
        order = list(graph.nodes)
        marked = [index for index, node in enumerate(order) if op_of(node) in names]
        if marked:
            nodes = order[marked[0] : marked[-1] + 1]  # with the nodes that lowering inserted in between
            name = f"segment{number}"
            inner, is_random = extract(graph, nodes, name), not names.isdisjoint(random)
            if rewrite is not None:
                rewrite(inner.graph, inner, random)
                inner.recompile()
            title = f"{segment[0]} .. {segment[-1]}"
            root.add_module(name, Recomputed(inner, is_random=is_random, name=title, watch=watch, stops_early=rewrite is None))
    if rewrite is not None:
        rewrite(graph, root, random)
    return fx.GraphModule(root, graph)


def extract(graph: fx.Graph, nodes: Sequence[fx.Node], name: str) -> fx.GraphModule:
    """Moves a run of nodes into a module, and puts a call of it in their place."""
    own = set(nodes)
    inputs = tuple(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own))
    outputs = tuple(node for node in nodes if any(user not in own for user in node.users))
    inner = fx.Graph()
    copies = {source: inner.placeholder(source.name) for source in inputs}
    for node in nodes:
        copies[node] = inner.node_copy(node, copies.__getitem__)
    inner.output(tuple(copies[node] for node in outputs))
    with graph.inserting_after(nodes[-1]):
        call = graph.create_node("call_module", name, inputs)
    place = call
    for index, node in enumerate(outputs):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (call, index), name=f"{node.name}_again")
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in own)
    for node in reversed(nodes):
        graph.erase_node(node)
    return fx.GraphModule(nn.Module(), inner)
