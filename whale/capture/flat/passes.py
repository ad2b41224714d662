"""Passes over the flat graph: writes are normalized, dead code, needless detaches and slices of all elements removed.

Each write is an op whose first argument is written. Writes to the user's batch go to a copy. Writes to parameters, which are the
optimizer's, and to tensors that are no state of the model are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from whale.capture.exporting.reads import held
from whale.capture.flat.aliasing import gradient_flow, memory_roots, written_arguments
from whale.capture.flat.flatten import Flat
from whale.capture.source import line_of
from whale.errors import CaptureError, WhaleError, raise_faults

aten = torch.ops.aten

_HINTS = {
    "parameter": "use a new value in its place (self.weight.clamp(...)), or write it after the step; what forward keeps is a buffer",
    "constant": "make it a buffer (register_buffer), which belongs to the model's state",
}


def settle_writes(flat: Flat) -> None:
    """Normalizes the writes of a flat graph: each is of an op's first argument, which is an activation or a buffer.

    Raises:
        CaptureError: all writes to parameters, to tensors that are no state of the model, or to other arguments.
    """
    for node in list(flat.graph.nodes):
        _without_out(node)
    faults: list[WhaleError] = [fault for node in flat.graph.nodes for fault in _faults(node)]
    written: set[fx.Node] = set()
    roots = memory_roots(flat.graph)
    for node in flat.graph.nodes:
        for root in {roots[base] for base in written_arguments(node)}:
            kind = flat.kinds.get(root.name, "")
            if kind in _HINTS:
                faults.append(_refused(node, kind, flat.sources.get(root.name, root.name), _HINTS[kind]))
            elif kind == "input":
                written.add(root)
    raise_faults(faults)
    for root in written:
        _copy_first(flat.graph, root)
    _keep_what_was_read(flat)


def _keep_what_was_read(flat: Flat) -> None:
    """Makes ops read copies of a buffer that is replaced at the end, as ``self.mean = ...`` does.

    In the model the name is bound to a new tensor, and a backward pass finds the old one unchanged. Here ``copy_`` overwrites the
    buffer's memory, as its last access.
    """
    roots = memory_roots(flat.graph)
    nodes = [node for node in flat.graph.nodes if node.op == "call_function"]
    touching = {node: {roots[source] for source in node.all_input_nodes} for node in nodes}
    last = {root: node for node in nodes for root in touching[node] if flat.kinds.get(root.name) == "buffer"}
    replaced = {root for root, node in last.items() if node.target is aten.copy_.default and roots[node.args[0]] is root}
    for node in nodes:
        found = [source for source in node.all_input_nodes if roots[source] in replaced]
        if not found or written_arguments(node) or roots[node] in replaced:
            continue
        for source in found:
            with flat.graph.inserting_before(node):
                copied = flat.graph.call_function(aten.clone.default, (source,))
            copied.meta = {**node.meta, "val": source.meta["val"].clone()}
            node.replace_input_with(source, copied)


def _faults(node: fx.Node) -> Iterator[WhaleError]:
    if any(base is not node.args[0] for base in written_arguments(node)):
        text = f"{node.target} writes other arguments than its first, which is not supported"
        yield CaptureError(text, where=line_of(node))


def _refused(node: fx.Node, kind: str, name: str, hint: str) -> WhaleError:
    held = "a parameter" if kind == "parameter" else "not a buffer of the model"
    line = line_of(node)
    return CaptureError(f"{node.target} writes {name}, which is {held}", where=line, hint=hint)


def _copy_first(graph: fx.Graph, root: fx.Node) -> None:
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        copied = graph.call_function(aten.clone.default, (root,))
    copied.meta = {**root.meta, "val": root.meta["val"].clone()}
    root.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)


def _without_out(node: fx.Node) -> None:
    """Writes ``op(x, out=y)`` as ``y.copy_(op(x))``."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments if argument.is_out] if schema is not None else []
    if len(names) != 1 or names[0] not in node.kwargs:
        return
    functional = _functional(node.target, names[0])
    if functional is None:
        return
    target = node.kwargs[names[0]]
    assert isinstance(target, fx.Node)
    with node.graph.inserting_before(node):
        made = node.graph.call_function(functional, node.args, {key: value for key, value in node.kwargs.items() if key != names[0]})
    made.meta = {**node.meta, "val": node.meta["val"].clone()}
    node.target, node.args, node.kwargs = aten.copy_.default, (target, made), {}


def _functional(target: Any, out: str) -> Any:
    """The functional overload with the same arguments."""
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments if argument.name != out]
    for name in target.overloadpacket.overloads():
        found = getattr(target.overloadpacket, name)
        if [(argument.name, str(argument.type)) for argument in found._schema.arguments] == wanted and not found._schema.is_mutable:
            return found
    return None


def remove_dead_code(graph: fx.Graph, keep: frozenset[str]) -> None:
    """Removes what the output does not need.

    An in-place op is needed if it writes to a placeholder in `keep` (a buffer), or to memory that a needed op reads; so are checks of
    conditions.
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
    """Removes detaches of what has no gradient, as inlined `no_grad` regions leave them."""
    flow = gradient_flow(graph)
    for node in list(graph.nodes):
        if node.target is aten.detach.default and not flow[node.args[0]]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_END = (1 << 63) - 1
"""Where a slice ends that has no end."""


def drop_whole_slices(graph: fx.Graph) -> None:
    """Removes slices from the first element to the last (``x[:, :]``), which eager mode makes none of, and whose backward pass copies."""
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
        source, _, start, end, step = given
        is_returned = source.op == "placeholder" and any(user.op == "output" for user in node.users)  # only ops are
        if start in (0, None) and end in (_END, None) and step == 1 and not node.kwargs and not is_returned:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
