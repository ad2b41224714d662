"""Floating-point operations of an op, forward and backward, at the example's sizes; a multiply-add is 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from whale.axes.operators import Operator, entry_of
from whale.capture.flat.gradients import may_have_gradient

aten = torch.ops.aten


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
    entry = entry_of(str(node.target))
    product = _product_flops(node, entry)
    if product is not None:
        places = (node.args[place] for place in entry.factors if place < len(node.args))
        factors = {item for place in places for item in (place if isinstance(place, (list, tuple)) else (place,)) if isinstance(item, Node)}
        backward = product * sum(operand in factors for operand in operands)
        return product, backward if gets_gradient else 0
    elements = max(_num_elements(read) for read in (node, *(() if entry.gathers else node.all_input_nodes)))
    return elements, elements * len(operands) if gets_gradient else 0


def _product_flops(node: Node, entry: Operator) -> int | None:
    """FLOPs of a product of matrices, convolution, attention or recurrence; None for anything else."""
    args, results = [_as_shapes(argument) for argument in node.args], _shapes_of(node)
    if entry.flops is not None:
        return entry.flops(args, results)
    registered = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if registered is None:
        return None
    named = {name: _as_shapes(argument) for name, argument in node.kwargs.items()}
    return int(registered(*args, **named, out_val=results[0] if len(results) == 1 else results))


def _as_shapes(argument: Any) -> Any:
    """An argument with the shapes of tensors, and sizes at their hints, in their places."""
    if isinstance(argument, (list, tuple)):
        return [_as_shapes(item) for item in argument]
    if not isinstance(argument, Node):
        return argument
    shapes = _shapes_of(argument)
    return shapes[0] if shapes else hint_of(argument.meta.get("val"))


def _shapes_of(node: Node) -> list[torch.Size]:
    """Example shapes of a node's tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [torch.Size(map(hint_of, item.shape)) for item in values if isinstance(item, torch.Tensor)]


def _num_elements(node: Node) -> int:
    return sum(math.prod(shape) for shape in _shapes_of(node))


def _is_view(target: torch._ops.OpOverload) -> bool:
    returns = target._schema.returns
    if not returns:
        return True
    alias = returns[0].alias_info
    return (alias is not None and not alias.is_write) or target.overloadpacket in (aten.reshape, aten.to, aten.contiguous)


def hint_of(size: Any) -> Any:
    """A size at the example's rows; one that depends on values in tensors counts as 1."""
    if not isinstance(size, torch.SymInt):
        return size
    return 1 if size.node.hint is None else size.node.hint
