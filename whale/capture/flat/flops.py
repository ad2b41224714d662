"""Floating-point operations of an op, forward and backward, at the example's sizes; a multiply-add is 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from whale.capture.flat.gradients import may_have_gradient

aten = torch.ops.aten

Shape = Sequence[int]
Formula = Callable[[Node], int]


def op_flops(node: Node, gradients: Mapping[Node, bool] | None = None) -> tuple[int, int]:
    """FLOPs of one call, forward and backward.

    A product of matrices costs its own forward FLOPs again for each operand that gets a gradient; any other op
    costs one per element it makes or reads, forward, and one per element and operand with a gradient, backward.
    Views, integers and ops without a tensor result cost nothing.

    Args:
        node: a call of a flat ATen graph with its example value in ``meta["val"]``; symbolic sizes count at their hints.
        gradients: whether a gradient flows into a node; without it, into each that is floating-point.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or _is_view(node.target):
        return 0, 0
    operands = [source for source in node.all_input_nodes if may_have_gradient(source) and (gradients is None or gradients[source])]
    gets_gradient = may_have_gradient(node) and (gradients is None or gradients[node])
    product = _product_flops(node)
    if product is not None:
        factors = _factors(node)
        backward = product * sum(operand in factors for operand in operands)
        return product, backward if gets_gradient else 0
    elements = max([_num_elements(node), *(_num_elements(source) for source in node.all_input_nodes)])
    if not _reads_all(node):
        elements = _num_elements(node)
    return elements, elements * len(operands) if gets_gradient else 0


def shapes_of(node: Node) -> list[tuple[int, ...]]:
    """Example shapes of a node's tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [tuple(_hint(size) for size in item.shape) for item in values if isinstance(item, torch.Tensor)]


def _product_flops(node: Node) -> int | None:
    """FLOPs of a product of matrices, convolution, attention or recurrence; None for anything else."""
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    formula = _FORMULAS.get(packet)
    if formula is not None:
        return formula(node)
    registered = flop_registry.get(packet)
    if registered is None:
        return None
    arguments = [_as_shapes(argument) for argument in node.args]
    named = {name: _as_shapes(argument) for name, argument in node.kwargs.items()}
    results = shapes_of(node)
    return int(registered(*arguments, **named, out_val=results[0] if len(results) == 1 else results))


def _as_shapes(argument: Any) -> Any:
    if not isinstance(argument, Node):
        return argument
    shapes = shapes_of(argument)
    return torch.Size(shapes[0]) if shapes else _hint(argument.meta.get("val"))


def _factors(node: Node) -> set[Node]:
    """The operands that are multiplied, as against added biases, masks and offsets."""
    names = {"aten.addmm": (1, 2), "aten.baddbmm": (1, 2), "aten.addmv": (1, 2), "aten.scaled_dot_product_attention": (0, 1, 2)}
    positions = names.get(_packet_name(node), (0, 1))
    if _packet_name(node) == "aten.einsum":
        return set(node.all_input_nodes)
    if _packet_name(node) in _RECURRENT | _CELLS:
        return {node.args[0], *_recurrent_weights(node)}  # type: ignore[arg-type]
    return {argument for index in positions if index < len(node.args) and isinstance(argument := node.args[index], Node)}


def _linear(node: Node) -> int:
    """``x[..., i] @ w[o, i]``: each result element is a sum of i products."""
    return 2 * _num_elements(node) * _shape(node.args[0])[-1]


def _convolution(node: Node) -> int:
    """Each result element is a sum over the filter: input channels of its group times the filter's area."""
    return 2 * _num_elements(node) * math.prod(_shape(node.args[1])[1:])


def _transposed_convolution(node: Node) -> int:
    """Each input element is multiplied by its filter: output channels of its group times the filter's area."""
    return 2 * math.prod(_shape(node.args[0])) * math.prod(_shape(node.args[1])[1:])


def _attention(node: Node) -> int:
    """``softmax(q[.., s, e] k[.., t, e]^T) v[.., t, f]``, masked or not."""
    query, key, value = (_shape(argument) for argument in node.args[:3])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _grouped_mm(node: Node) -> int:
    """Rows sorted by group, one matrix per group: each row meets one matrix."""
    return 2 * math.prod(_shape(node.args[0])) * _shape(node.args[1])[-1]


def _einsum(node: Node) -> int:
    """All letters multiplied out, operand by operand."""
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    letters = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    extra = 1
    for names, operand in zip(letters, operands, strict=True):
        shape, (before, dots, after) = _shape(operand), names.partition("...")
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(reversed(after), reversed(shape), strict=False))
        if dots:
            extra = max(extra, math.prod(shape[len(before) : len(shape) - len(after)]))
    return 2 * extra * math.prod(sizes.values()) * max(len(operands) - 1, 1)


def _recurrent(node: Node) -> int:
    """Every weight matrix meets every time step of every sequence."""
    steps = math.prod(_shape(node.args[0])[:-1])
    return 2 * steps * sum(math.prod(shape) for weight in _recurrent_weights(node) if len(shape := _shape(weight)) == 2)


def _recurrent_weights(node: Node) -> list[Node]:
    if _packet_name(node) not in _RECURRENT:  # a cell, which has them behind its input and state
        return [weight for weight in node.args[2:] if isinstance(weight, Node)]
    lists = [argument for argument in node.args if isinstance(argument, (list, tuple))]
    return [weight for weight in lists[-1] if isinstance(weight, Node)]


_RECURRENT = frozenset(("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"))
_CELLS = frozenset(("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell"))

_FORMULAS: dict[object, Formula] = {
    **dict.fromkeys((aten.linear, aten.matmul, aten.mv, aten.dot, aten.vdot, aten.inner), _linear),
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d), _convolution),
    **dict.fromkeys((aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d), _transposed_convolution),
    **dict.fromkeys((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu), _recurrent),
    **dict.fromkeys((aten.lstm_cell, aten.gru_cell, aten.rnn_tanh_cell, aten.rnn_relu_cell), _recurrent),
    aten.scaled_dot_product_attention: _attention,
    aten._grouped_mm: _grouped_mm,
    aten.einsum: _einsum,
}


def _packet_name(node: Node) -> str:
    return str(node.target.overloadpacket)  # type: ignore[union-attr]


def _shape(argument: object) -> tuple[int, ...]:
    assert isinstance(argument, Node)
    return shapes_of(argument)[0]


def _num_elements(node: Node) -> int:
    return sum(math.prod(shape) for shape in shapes_of(node))


def _reads_all(node: Node) -> bool:
    """Whether an op reads all elements of its operands (a lookup does not)."""
    return node.target.overloadpacket not in _LOOKUPS  # type: ignore[union-attr]


_LOOKUPS = frozenset((aten.embedding, aten.index, aten.index_select, aten.gather, aten.take, aten.slice_scatter))


def _is_view(target: torch._ops.OpOverload) -> bool:
    returns = target._schema.returns
    if not returns:
        return True
    alias = returns[0].alias_info
    return (alias is not None and not alias.is_write) or target.overloadpacket in (aten.reshape, aten.to, aten.contiguous)


def _hint(size: Any) -> Any:
    """A size at the example's rows; one that depends on values in tensors counts as 1."""
    if not isinstance(size, torch.SymInt):
        return size
    return 1 if size.node.hint is None else size.node.hint
