"""Into which values of a flat graph a gradient flows: forward from the trainable parameters, cut where torch cuts it."""

from __future__ import annotations

import torch
from torch import fx

from whale.capture.flat.aliasing import memory_roots, written_arguments
from whale.capture.flat.sizes import tensors_of

aten = torch.ops.aten

_CUTS = frozenset(
    (aten.detach, aten.detach_, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like, aten.randn_like)
    + (aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided)
)


def gradient_flow(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Per node, whether a gradient flows into its result.

    An in-place write of a value with a gradient gives one to the memory that it writes, from then on.
    """
    roots = memory_roots(graph, differentiable=True)
    members: dict[fx.Node, list[fx.Node]] = {}
    flow: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        flow[node] = _flows(node, flow)
        members.setdefault(roots[node], []).append(node)
        for written in written_arguments(node):
            if flow[node] and not flow[written]:
                _spread(members[roots[written]], flow)
    return flow


def _flows(node: fx.Node, flow: dict[fx.Node, bool]) -> bool:
    if not may_have_gradient(node):
        return False
    if node.op == "placeholder":
        return bool(node.meta["val"].requires_grad)
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _CUTS:
        return False
    return any(flow[source] for source in node.all_input_nodes)


def _spread(nodes: list[fx.Node], flow: dict[fx.Node, bool]) -> None:
    for node in nodes:
        if node.op != "placeholder" and may_have_gradient(node):
            flow[node] = True


def may_have_gradient(node: fx.Node) -> bool:
    """Whether a result is of a type that gradients are of."""
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_of(node))
