"""Attention over groups of heads, as the kernels of a device want it.

    flash kernels take groups: half precision without a mask on GPUs from compute capability 8.0 on      k, v, enable_gqa=True
    the other fast kernels take none, and with groups torch writes out all scores                        k, v repeated

The graph has groups wherever the model repeats heads or says `enable_gqa` (`whale.capture.flat.masks`): one graph serves all devices of
a mixed cluster, and each repeats what its own kernels need.
"""

from __future__ import annotations

import torch
from torch import fx

from whale.ir.graph import ModelGraph, Op, Ref
from whale.runtime.program.marks import OP, op_of

aten = torch.ops.aten

_QUERY, _KEY, _VALUE, _MASK = 0, 1, 2, 3
_HEADS = -3
"""Dimension of the heads."""
_HALF = (torch.float16, torch.bfloat16)
_LEAST_CAPABILITY = (8, 0)


def repeat_groups(graph: fx.Graph, model: ModelGraph, device: torch.device) -> None:
    """Repeats keys and values of grouped attention where fast kernels of a device take no groups, in place.

    Args:
        graph: of a stage, its nodes marked with their op's name.
    """
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        name = op_of(node)
        if name is None or not node.kwargs.get("enable_gqa") or takes_groups(model.by_name[name], device):
            continue
        heads = [_num_heads(model, model.by_name[name], place) for place in (_QUERY, _KEY, _VALUE)]
        for place in (_KEY, _VALUE):
            with graph.inserting_before(node):
                repeated = graph.call_function(aten.repeat_interleave.self_int, (node.args[place], heads[_QUERY] // heads[place], _HEADS))
            repeated.meta[OP] = name  # so that it belongs to the attention's segment
            node.update_arg(place, repeated)
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "enable_gqa"}


def takes_groups(attention: Op, device: torch.device) -> bool:
    """Whether a device has a fast kernel for an attention over groups."""
    mask = attention.args[_MASK] if len(attention.args) > _MASK else dict(attention.kwargs).get("attn_mask")
    return has_grouped_kernel(getattr(torch, attention.outputs[0].dtype), device, has_mask=mask is not None)


def has_grouped_kernel(dtype: torch.dtype, device: torch.device, *, has_mask: bool) -> bool:
    """The same by the type of the result, and by whether there is a mask that the kernel does not make itself."""
    if device.type != "cuda":
        return True
    return dtype in _HALF and not has_mask and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def _num_heads(model: ModelGraph, attention: Op, place: int) -> int:
    operand = attention.args[place]
    assert isinstance(operand, Ref), "operands of an attention are results of ops"
    return model.by_name[operand.op].outputs[0].shape[_HEADS]
