"""Which tensors of a flat graph share memory, and which get a gradient."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from whale.axes.operators import entry_of_call
from whale.axes.operators.entry import SHAPED
from whale.capture.flat.sizes import tensors_of
from whale.errors import OpFault
from whale.ir.writes import marked_arguments


def written_arguments(node: fx.Node) -> list[fx.Node]:
    return marked_arguments(node, writes=True)


def viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory an op's results may share by schema, or do share here: some ops return their operand."""
    return [] if _converts(node) else marked_arguments(node, writes=False) or _shared(node)


def _converts(node: fx.Node) -> bool:
    """Whether the result has another dtype and its own memory: a conversion's schema says that it may alias."""
    result, source = (item.meta.get("val") for item in (node, (node.all_input_nodes or [node])[0]))
    if not isinstance(result, Tensor) or not isinstance(source, Tensor):
        return False
    return result.dtype != source.dtype and result.untyped_storage()._cdata != source.untyped_storage()._cdata


def _shared(node: fx.Node) -> list[fx.Node]:
    """The first argument if the result aliases it against the schema: a dropout outside training, an einsum that permutes."""
    sources = node.all_input_nodes[:1]
    result, source = (item.meta.get("val") for item in (node, (sources or [node])[0]))
    if not sources or not isinstance(result, Tensor) or not isinstance(source, Tensor):
        return []
    return sources if result.untyped_storage()._cdata == source.untyped_storage()._cdata else []


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is made from."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending += each.all_input_nodes
    return found


def memory_roots(graph: fx.Graph, *, differentiable: bool = False) -> dict[fx.Node, fx.Node]:
    """Per node, the node whose memory it is a view of; itself if it has its own, or is detached and `differentiable`.

    Autograd does not see writes to a detached view.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        bases = viewed_arguments(node) if node.op == "call_function" else []
        if differentiable and node.target is torch.ops.aten.detach.default:
            bases = []
        if node.target is operator.getitem:
            bases = node.all_input_nodes
        roots[node] = roots[bases[0]] if bases else node
    return roots


DETACH = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


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
    if node.target in DETACH or takes_shape(node):
        return False
    return any(flow[source] for source in node.all_input_nodes)


def _spread(nodes: list[fx.Node], flow: dict[fx.Node, bool]) -> None:
    for node in nodes:
        if node.op != "placeholder" and may_have_gradient(node):
            flow[node] = True


def takes_shape(node: fx.Node) -> bool:
    """Whether an op makes a new tensor, and reads of others at most their shapes."""
    does = entry_of_call(str(node.target)).rows
    return (does == "filled" or does in SHAPED) and not written_arguments(node)


def may_have_gradient(node: fx.Node) -> bool:
    """Whether a result has a dtype that can have a gradient."""
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_of(node))


STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)


def strided(tensor: Tensor, strides: Sequence[int], sizes: Sequence[int], new_strides: Sequence[int], offset: int) -> Tensor:
    """`as_strided` of a tensor, or of a copy with the `strides` of the capture if it has others; `offset` is from its first element.

    Raises:
        OpFault: the strides differ, and elements outside of the tensor would be read.
    """
    if tensor.stride() != tuple(strides):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        reach = offset + sum((size - 1) * stride for size, stride in zip(sizes, new_strides, strict=True))
        if last + 1 != tensor.numel() or not 0 <= offset <= reach <= last:
            raise OpFault("as_strided reads memory that is not part of its tensor, which is not supported")
        tensor = torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided(sizes, new_strides, tensor.storage_offset() + offset)
