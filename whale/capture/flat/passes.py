"""Passes over the flat graph: writes are normalized, causal masks replaced, dead code and needless detaches removed.

Each write is an op whose first argument is written. Writes to the user's batch go to a copy. Writes to parameters, which are the
optimizer's, and to tensors that are no state of the model are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from whale.capture.exporting.reads import held
from whale.capture.flat.aliasing import ancestors, gradient_flow, memory_roots, written_arguments
from whale.capture.flat.flatten import Flat
from whale.capture.flat.sizes import hint_of
from whale.capture.source import line_of
from whale.errors import CaptureError, WhaleError, raise_faults
from whale.ir.graph import NUM_ROWS

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


_MASK, _DROPOUT, _IS_CAUSAL = 3, 4, 5
_COUNTS = (aten.arange.default, aten.arange.start)
_VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default, aten.alias.default, aten.slice.Tensor)
_LARGEST = 1 << 26  # elements of a mask that is examined


def drop_causal_masks(graph: fx.Graph, num_rows: int) -> None:
    """Replaces causal masks that are known without a batch by the kernel's ``is_causal``; they become dead code.

        mask = arange(T)[:, None] >= arange(T)     attention(q, k, v, mask)
                                                   attention(q, k, v, is_causal=True)

    Some libraries make such masks only when they are traced; kernels that read a mask are slower, and the fastest take none.
    """
    known: dict[fx.Node, Any] = {}
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        mask, is_causal = (*node.args, None, 0.0, False)[_MASK], (*node.args[_IS_CAUSAL:], node.kwargs.get("is_causal", False))[0]
        if len(node.args) <= _MASK or not isinstance(mask, fx.Node) or is_causal or not _may_be_causal(node, mask):
            continue
        if mask not in known:
            known[mask] = _is_causal(mask, num_rows)
        if known[mask]:
            dropout = node.args[_DROPOUT] if len(node.args) > _DROPOUT else node.kwargs.get("dropout_p", 0.0)
            node.args = (*node.args[:_MASK], None, dropout, True)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("dropout_p", "is_causal")}


def _may_be_causal(node: fx.Node, mask: fx.Node) -> bool:
    value = mask.meta["val"]
    lengths = [node.args[place].meta["val"].shape[-2] for place in (0, 1)]  # type: ignore[union-attr]
    is_square = value.dim() >= 2 and all(isinstance(length, int) for length in (*lengths, *value.shape[-2:]))
    return value.dtype is torch.bool and is_square and lengths[0] == lengths[1] == value.shape[-1] == value.shape[-2]


def _is_causal(mask: fx.Node, num_rows: int) -> bool:
    """Whether a mask depends on no batch or weights, is the same for all rows and heads, and is causal."""
    made_of = ancestors(mask)
    if not _is_equal_in_rows([node for node in mask.graph.nodes if node in made_of]):
        return False
    values: dict[fx.Node, Any] = {}
    try:
        for node in mask.graph.nodes:
            if node in made_of:
                values[node] = num_rows if node.op == "placeholder" else _on_host(node, values)
        value = values[mask]
        causal = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
        return bool((value.reshape(-1, *value.shape[-2:]) == causal).all())
    except Exception:  # what cannot be computed here is not known
        return False


def _on_host(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_equal_in_rows(nodes: list[fx.Node]) -> bool:
    """Whether values made from nothing but the number of rows are the same for each row, for any number.

    The number itself may be a size. A range over the rows may index equal rows, as in code that looks for packed sequences.
    """
    counts = set[fx.Node]()
    for node in nodes:
        if node.op == "placeholder":
            if node.target != NUM_ROWS:
                return False
            continue
        if node.op != "call_function" or _is_unknown(node):
            return False
        if not isinstance(node.meta["val"], Tensor):
            continue  # a size
        if any(isinstance(argument, fx.Node) and not isinstance(argument.meta["val"], Tensor) for argument in node.args):
            if node.target not in _COUNTS:
                return False
            counts.add(node)
        read = counts.intersection(node.all_input_nodes)
        if read and node.target in _VIEWS:
            counts.add(node)
        elif read and (node.target is not aten.index.Tensor or node.args[0] in counts):
            return False
    return True


def _is_unknown(node: fx.Node) -> bool:
    """Whether an op draws random numbers, writes, or makes too large a tensor."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(value, Tensor):
        return not isinstance(value, (int, torch.SymInt))
    if isinstance(target, torch._ops.OpOverload) and (torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable):
        return True
    return bool(hint_of(value.numel()) > _LARGEST)
