"""Losses and reductions of torch as parts, (sum, divisor): one rule per family of ops; and how a part is built in the graph.

loss = sum over parts of  coefficient x factors x sum / divisor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from whale.capture.loss.facts import BatchFacts, constant_of, tensor_of

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2
_HALF = (torch.float16, torch.bfloat16)


_ORIGIN = ("stack_trace", "nn_module_stack", "custom")


class NodeBuilder:
    """Inserts nodes after everything that they read, with the line and module of `origin`; the first one directly after it.

    What was `built` for the same origin is used again, so that a metric that is part of the loss takes no op of its own.
    """

    def __init__(self, graph: Graph, origin: Node, built: dict[tuple[object, ...], Node]) -> None:
        self._graph, self._built = graph, built
        self._origin = origin
        self._last = origin

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Adds a call; its example value is computed from those of its arguments."""
        key = self._origin, target, repr(args), repr(kwargs)
        if key in self._built:
            return self._move_behind(self._built[key])
        map_arg((args, kwargs), self._move_behind)
        while self._last.op in ("placeholder", "get_attr") and self._last.next.op in ("placeholder", "get_attr"):
            self._last = self._last.next
        with self._graph.inserting_after(self._last):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: self._origin.meta[key] for key in _ORIGIN if key in self._origin.meta}
        node.meta["val"] = example(target, *args, **kwargs, like=self._origin)
        self._last = self._built[key] = node
        return node

    def _move_behind(self, node: Node) -> Node:
        if self._last < node:
            self._last = node
        return node


Emit = Callable[[NodeBuilder], Node]  # builds a node after the analysis; nothing is added to the graph before


@dataclass(frozen=True)
class LossCall:
    """A call's arguments by the names in its op's schema, defaults filled in."""

    node: Node
    names: tuple[str, ...]
    values: dict[str, Any]

    @staticmethod
    def of(node: Node) -> LossCall:
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        values = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        values.update(zip((argument.name for argument in schema), node.args, strict=False))
        values.update(node.kwargs)
        return LossCall(node, tuple(argument.name for argument in schema if not argument.kwarg_only), values)

    def arguments(self, **changes: object) -> tuple[list[Any], dict[str, Any]]:
        values = {**self.values, **changes}
        return [values[name] for name in self.names], {name: value for name, value in values.items() if name not in self.names}

    @property
    def tensors(self) -> list[Node]:
        return [value for value in self.values.values() if isinstance(value, Node) and tensor_of(value) is not None]


def leaf_part(node: Node, facts: BatchFacts) -> LossPart | None:
    """A loss op as a sum over rows and a divisor; None if its rule does not say that it is one."""
    call = LossCall.of(node) if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten" else None
    if call is None or call.values.get("reduction") not in (_MEAN, _SUM) or not facts.are_per_row(call.tensors):
        return None
    how, divisor = facts.combination(node), None
    if how == "weighted_mean" and {"self", "target", "weight"} <= call.values.keys():
        divisor = _weight(call, facts)
    elif how == "mean":
        positional, named = call.arguments(reduction=_NONE)
        divisor = _elements(example(node.target, *positional, **named, like=node), facts)  # type: ignore[arg-type]
    elif how != "sum":
        return None
    return None if divisor is None and how != "sum" else LossPart(node, lambda build: _with_sum(build, call), divisor)


def reduction_part(node: Node, operand: Node, facts: BatchFacts, *, mean: bool) -> LossPart | None:
    """The sum or mean of `operand`, a tensor with rows, over all its dimensions."""
    if not facts.has_rows(operand) or not facts.are_per_row([operand]):
        return None
    kept = not mean and node.args[0] is operand
    dtype = node.kwargs.get("dtype")
    total: Emit = the_node(node) if kept else lambda build: _sum(build, operand, dtype)
    divisor = _elements(tensor_of(operand), facts) if mean else None
    if mean and divisor is None:
        return None
    return LossPart(node, total, divisor)


def _weight(call: LossCall, facts: BatchFacts) -> PerRow | Counted | None:
    """The divisor of cross-entropy and negative log likelihood: the weights of the targets that count."""
    logits, target, weights = call.values["self"], call.values["target"], call.values["weight"]
    if weights is not None and facts.needs_gradient(weights):
        return None
    if target.meta["val"].is_floating_point():  # probabilities: every row counts
        value = logits.meta["val"]
        return _elements(value, facts, int(value.shape[min(1, value.ndim - 1)]))
    ignored = call.values["ignore_index"]
    return Counted(lambda build: _count_targets(build, target, weights, ignored))


def _count_targets(build: NodeBuilder, target: Node, weights: Node | None, ignored: int) -> Node:
    """The number of targets that are not ignored, or the sum of their classes' weights."""
    counts = build.call(aten.ne.Scalar, target, ignored)
    if weights is None:
        return build.call(aten.sum.default, counts)
    safe = build.call(aten.mul.Tensor, target, counts)  # an ignored target may be no class at all
    picked = build.call(aten.index.Tensor, weights, [safe])
    return build.call(aten.sum.default, build.call(aten.mul.Tensor, picked, counts))


def _with_sum(build: NodeBuilder, call: LossCall) -> Node:
    """The loss op with reduction "sum"; halves are summed in float32, where they cannot overflow."""
    half = call.node.meta["val"].dtype in _HALF
    if call.values["reduction"] == _SUM and not half:
        return call.node
    positional, named = call.arguments(reduction=_NONE if half else _SUM)
    result = build.call(call.node.target, *positional, **named)  # type: ignore[arg-type]
    return _sum(build, result, None) if half else result


def _sum(build: NodeBuilder, operand: Node, dtype: object) -> Node:
    kind = torch.float32 if dtype is None and operand.meta["val"].dtype in _HALF else dtype
    return build.call(aten.sum.default, operand) if kind is None else build.call(aten.sum.default, operand, dtype=kind)


def describe(node: Node) -> str:
    """An op as a user may know it."""
    return f"{node.target} (%{node.name})" if node.op == "call_function" else f"%{node.name}"


def _elements(value: torch.Tensor | None, facts: BatchFacts, over: int = 1) -> PerRow | Counted | None:
    """The number of elements of a tensor with rows, all or selected ones, over a constant; None if the model selects them."""
    assert value is not None
    per_row, selected = facts.proportion(value.numel()), facts.selected(value.numel())
    if per_row is not None:
        return PerRow(per_row / over)
    if selected is None or not facts.is_known_before(selected[0]):
        return None
    return Counted(lambda build: count_selected(build, selected[0], selected[1] // over))


def count_selected(build: NodeBuilder, mask: Node, per_element: int) -> Node:
    """The number of elements that a mask selects, times a constant."""
    count = build.call(aten.count_nonzero.default, mask)
    return count if per_element == 1 else build.call(aten.mul.Tensor, count, per_element)


def is_full_reduction(node: Node) -> bool:
    """Whether a sum or mean leaves one element, whatever the batch."""
    value = tensor_of(node)
    return value is not None and all(constant_of(size) == 1 for size in value.shape)


@dataclass(frozen=True)
class PerRow:
    """A divisor in proportion to the rows: ``count x rows``."""

    count: Fraction


@dataclass(frozen=True)
class Counted:
    """A divisor that is itself a sum over the batch: ``max(sum of emit's values + offset, minimum)``."""

    emit: Emit
    offset: float = 0.0
    minimum: float | None = None


@dataclass(frozen=True)
class Factor:
    """A scalar that does not depend on the batch, by which a sum is multiplied or divided."""

    node: Node
    divides: bool

    def apply(self, total: Node, build: NodeBuilder) -> Node:
        return build.call(aten.div.Tensor if self.divides else aten.mul.Tensor, total, self.node)


@dataclass(frozen=True)
class LossPart:
    """One addend of the loss."""

    leaf: Node  # the op in the user's graph
    total: Emit  # builds its sum over the rows of the example
    divisor: PerRow | Counted | None = None  # of the sum over the whole batch; None for 1
    coefficient: float = 1.0  # constant factor
    factors: tuple[Factor, ...] = ()  # scalars of the model it is scaled by
    reason: str = ""  # why sums over pieces of a batch do not give the loss of the whole; "" if they do

    @property
    def exact(self) -> bool:
        return not self.reason

    @property
    def is_plain(self) -> bool:
        """Whether it is additive: its value for the batch is the sum of its values for the pieces."""
        return self.divisor is None and self.exact

    def scaled(self, factor: float) -> LossPart:
        return replace(self, coefficient=self.coefficient * factor)

    def by(self, factor: Factor) -> LossPart:
        return replace(self, factors=(*self.factors, factor))

    def over_rows(self, count: Fraction) -> LossPart | None:
        """The part divided by ``count x rows``; None if that is no such part."""
        return replace(self, divisor=PerRow(count)) if self.divisor is None else None

    def times_rows(self, count: Fraction) -> LossPart | None:
        """The part times ``count x rows``; None if that is no such part."""
        if not isinstance(self.divisor, PerRow):
            return None
        return replace(self, divisor=None, coefficient=self.coefficient * float(count / self.divisor.count))

    def emit_sum(self, build: NodeBuilder) -> Node:
        """Builds the sum with its factors, as a tensor without dimensions."""
        total = self.total(build)
        if total.meta["val"].ndim > 0:
            total = build.call(aten.reshape.default, total, [])
        for factor in self.factors:
            total = factor.apply(total, build)
        if total.meta["val"].ndim > 0:
            total = build.call(aten.reshape.default, total, [])
        return total


def the_node(node: Node) -> Emit:
    return lambda _build: node


def complete(parts: Sequence[LossPart | None]) -> list[LossPart] | None:
    """The parts, if none is None."""
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def example(target: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Any:
    """An op's result on the example values of its arguments, in the fake mode of `like`."""
    values = map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = getattr(like.meta["val"], "fake_mode", None)
    with torch.no_grad(), nullcontext() if mode is None else mode:
        return target(*values[0], **values[1])
