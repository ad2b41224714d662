"""Backward in two parts: input gradients at once (I), weight gradients when the schedule says so (W).

An op that reads a trainable parameter directly, and whose weight gradient is worth deferring, is replaced by a function
whose backward returns the input's gradient and queues the weight's:

    F   y = linear(x, w)                queue: empty
    I   x.grad = y.grad @ conj(w)       queue: (x, y.grad)
    W   w.grad += y.grad.T @ conj(x)    queue: empty

A parameter that is cast for the op (autocast) counts as read directly: the cast runs with the op, and its gradient in W.
Every use of a parameter queues its own part, so shared weights add up. Ops without a rule compute weight gradients in I, which
is exact as well, but not deferred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from whale.axes.operators import entry_of

aten = torch.ops.aten
Gradients = tuple[torch.Tensor | None, ...]
Types = tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class Rule:
    """How the backward of one op is divided."""

    data: int  # position of the input that is no parameter
    weights: tuple[int, ...]  # positions of the parameters
    input_gradient: Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor | None]  # from the op's arguments and the output's gradient
    weight_gradients: Callable[[tuple[Any, ...], torch.Tensor], Gradients]  # from the same, one per position in `weights`
    is_real: bool = False  # whether they hold for real tensors only; complex calls are left as they are
    # whether a call has the plain form of the rule; also takes the number of dimensions of its arguments
    fits: Callable[[fx.Node, Sequence[int | None]], bool] = lambda node, num_dims: True


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _linear_weights(args: tuple[Any, ...], gradient: torch.Tensor) -> Gradients:
    flat = _rows(gradient)
    return flat.t() @ _rows(args[0]).conj(), flat.sum(0)


def _addmm_weights(args: tuple[Any, ...], gradient: torch.Tensor) -> Gradients:
    return gradient.sum(0), args[1].mH @ gradient


def _matmul_weights(args: tuple[Any, ...], gradient: torch.Tensor) -> Gradients:
    return (_rows(args[0]).mH @ _rows(gradient),)


def _convolution(args: tuple[Any, ...], gradient: torch.Tensor, mask: list[bool]) -> Gradients:
    spatial = args[1].dim() - 2
    settings: list[Any] = [*args[3:], *(1, 0, 1, 1)[max(len(args) - 3, 0) :]]
    stride, padding, dilation, groups = settings
    sizes = [list(value) if isinstance(value, (list, tuple)) else [value] * spatial for value in (stride, padding, dilation)]
    bias_sizes = None if len(args) < 3 or args[2] is None else [args[1].shape[0]]
    result: Gradients = aten.convolution_backward.default(
        gradient, args[0], args[1], bias_sizes, *sizes, False, [0] * spatial, groups, mask
    )
    return result


def _convolution_weights(args: tuple[Any, ...], gradient: torch.Tensor) -> Gradients:
    has_bias = len(args) > 2 and args[2] is not None
    return _convolution(args, gradient, [False, True, has_bias])[1:]


def _embedding_weights(args: tuple[Any, ...], gradient: torch.Tensor) -> Gradients:
    padding = args[2] if len(args) > 2 else -1
    by_frequency = args[3] if len(args) > 3 else False
    return (aten.embedding_dense_backward.default(gradient, args[1], args[0].shape[0], padding, by_frequency),)


RULES = {
    "linear": Rule(0, (1, 2), lambda args, g: g @ args[1].conj(), _linear_weights, fits=lambda node, dims: (dims[0] or 0) >= 2),
    "addmm": Rule(1, (0, 2), lambda args, g: g @ args[2].mH, _addmm_weights, fits=lambda node, dims: dims[0] == 1),
    "matmul": Rule(0, (1,), lambda args, g: g @ args[1].mH, _matmul_weights, fits=lambda node, dims: dims[1] == 2 and (dims[0] or 0) >= 2),
    "embedding": Rule(1, (0,), lambda args, g: None, _embedding_weights, fits=lambda node, dims: not any(node.args[4:])),
    "convolution": Rule(
        *(0, (1, 2), lambda args, g: _convolution(args, g, [True, False, False])[0], _convolution_weights),
        is_real=True,
        fits=lambda node, dims: not any(isinstance(argument, str) for argument in node.args),
    ),
}
"""By the name in `Operator.weights`."""


@cache
def rule_of(target: Any) -> Rule | None:
    name = entry_of(str(target)).weights
    return None if name is None else RULES[name]


class WeightQueue:
    """The pending weight gradients of one micro-batch."""

    def __init__(self) -> None:
        self._pending: list[tuple[Rule, tuple[Any, ...], Types, torch.Tensor]] = []

    def add(self, rule: Rule, args: tuple[Any, ...], types: Types, gradient: torch.Tensor) -> None:
        """Queues one op's weight gradients: its arguments before they are cast, and the types to cast them to."""
        self._pending.append((rule, args, types, gradient))

    def parameters(self) -> list[torch.Tensor]:
        """The parameter of each pending gradient, in the order in which `run` adds them."""
        return [parameter for rule, args, _, _ in self._pending for _, parameter in _weights(rule, args)]

    def run(self, is_final: Callable[[torch.Tensor], None] | None = None) -> None:
        """Adds every pending weight gradient to its parameter; `is_final` is called with a parameter after its last one."""
        num_uses, pending = Counter(self.parameters()), [*reversed(self._pending)]
        self._pending.clear()
        with torch.no_grad():
            while pending:  # what an op waited with is freed before the next one
                for parameter in _add(*pending.pop()):
                    num_uses[parameter] -= 1
                    if is_final is not None and num_uses[parameter] == 0:
                        is_final(parameter)


def _add(rule: Rule, args: tuple[Any, ...], types: Types, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Adds the weight gradients of one op; returns the parameters."""
    values, parameters = rule.weight_gradients(_as_types(args, types), gradient), list[torch.Tensor]()
    for number, parameter in _weights(rule, args):
        value = values[number]
        if value is not None:
            value = value.to(parameter.grad_dtype or parameter.dtype)
            parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)
        parameters.append(parameter)
    return parameters


def _weights(rule: Rule, args: tuple[Any, ...]) -> list[tuple[int, torch.Tensor]]:
    """The trainable parameters among an op's arguments, with their index in the rule's gradients."""
    found = [(number, args[position]) for number, position in enumerate(rule.weights) if position < len(args)]
    return [(number, parameter) for number, parameter in found if parameter is not None and parameter.requires_grad]


def _as_types(args: tuple[Any, ...], types: Types) -> tuple[Any, ...]:
    return tuple(value if dtype is None else value.to(dtype) for value, dtype in zip(args, types, strict=True)) if types else args


class _Deferred(torch.autograd.Function):
    """An op whose weight gradients go to a queue."""

    @staticmethod
    def forward(ctx: Any, queue: WeightQueue, rule: Rule, target: Any, types: Types, *args: Any) -> torch.Tensor:
        ctx.queue, ctx.rule, ctx.types = queue, rule, types
        ctx.places = [position for position, value in enumerate(args) if isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*(args[position] for position in ctx.places))  # so that torch sees an in-place change in between
        # A tensor that a checkpoint recomputes stands for the parameter, but has a gradient of its own.
        ctx.leaves = {position: args[position] for position in ctx.places if args[position].requires_grad and args[position].is_leaf}
        ctx.rest = tuple(None if isinstance(value, torch.Tensor) else value for value in args)
        output: torch.Tensor = target(*_as_types(args, types))
        # Some ops return a view of what they made, which autograd would not let later ops change in place.
        return output if output._base is None else output.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        rule = ctx.rule
        restored = list(ctx.rest)
        for position, value in zip(ctx.places, ctx.saved_tensors, strict=True):
            restored[position] = ctx.leaves.get(position, value)
        restored[rule.data] = restored[rule.data].detach()  # W needs nothing of what made it, and what came from another stage may go
        args = tuple(restored)
        ctx.queue.add(rule, args, ctx.types, gradient)
        results: list[Any] = [None] * (4 + len(args))
        if ctx.needs_input_grad[4 + rule.data]:
            results[4 + rule.data] = rule.input_gradient(_as_types(args, ctx.types), gradient)
        return tuple(results)


def deferred(queue: WeightQueue, target: Any, types: Types, *args: Any) -> torch.Tensor:
    """Runs an op whose weight gradients go to a queue.

    Args:
        target: the op, which has a rule.
        types: per argument, the type to cast it to first, or None; empty where none is cast.
    """
    rule = rule_of(target)
    assert rule is not None, target
    if rule.is_real and args[rule.data].is_complex():
        plain: torch.Tensor = target(*_as_types(args, types))
        return plain
    output: torch.Tensor = _Deferred.apply(queue, rule, target, types, *args)  # type: ignore[no-untyped-call]
    return output


def defer_weights(graph: fx.Graph, parameters: Collection[str], queue: fx.Node, num_dims: Callable[[fx.Node], int]) -> int:
    """Replaces the ops of a graph that have a rule and read trainable parameters directly.

    Args:
        graph: of a stage or a whole model; changed in place.
        parameters: the placeholders of trainable parameters.
        queue: the placeholder of the `WeightQueue`.
        num_dims: of a node's value; called with nodes of the original graph.

    Returns:
        How many were replaced.
    """
    found = [node for node in graph.nodes if _can_wait(node, parameters, num_dims)]
    for node in found:
        rule = rule_of(node.target)
        assert rule is not None
        casts = [_cast_of(argument) if place in rule.weights else (argument, None) for place, argument in enumerate(node.args)]
        types = tuple(dtype for _, dtype in casts) if any(dtype for _, dtype in casts) else ()
        with graph.inserting_before(node):
            replacement = graph.call_function(deferred, (queue, node.target, types, *(argument for argument, _ in casts)))
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        read = node.all_input_nodes
        graph.erase_node(node)
        for source in read:
            if source.target is aten.to.dtype and not source.users:
                graph.erase_node(source)
    return len(found)


def _can_wait(node: fx.Node, parameters: Collection[str], num_dims: Callable[[fx.Node], int]) -> bool:
    rule = rule_of(node.target) if node.op == "call_function" else None
    if rule is None or node.kwargs:
        return False
    weights = [node.args[p] for p in rule.weights if p < len(node.args) and node.args[p] is not None]
    is_direct = all(_brings(weight, parameters) for weight in weights)
    data = node.args[rule.data]
    dims = [num_dims(argument) if isinstance(argument, fx.Node) else None for argument in node.args]
    return is_direct and isinstance(data, fx.Node) and not _brings(data, parameters) and rule.fits(node, dims)


def _brings(argument: Any, parameters: Collection[str]) -> bool:
    """Whether an argument is the placeholder of one of the parameters, or a cast of it."""
    source, _ = _cast_of(argument)
    return isinstance(source, fx.Node) and source.op == "placeholder" and source.target in parameters


def _cast_of(argument: Any) -> tuple[Any, torch.dtype | None]:
    """The source of a cast and its type; (argument, None) where it is no cast."""
    is_cast = isinstance(argument, fx.Node) and argument.target is aten.to.dtype and len(argument.args) == 2 and not argument.kwargs
    return argument.args if is_cast else (argument, None)
