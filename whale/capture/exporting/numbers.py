"""Conditions on numbers that a model's code reads of tensors, asked as if they were asked of the tensors themselves.

    if lengths.max().item() > 64:            a number u0 is read, u0 > 64 is asked
        raise ValueError                     the way that it goes is found, and held to, as of `lengths.max() > 64`
    assert ids.max().item() < classes        the same; and so for `torch._check`

Torch calls a number that is not known yet a symbol, and asks its environment of shapes what conditions on symbols are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

Value = Tensor | int | float | torch.SymInt | torch.SymFloat


class ReadNumbers(ShapeEnv):
    """An environment that asks somebody what conditions on numbers that were read are.

    Args:
        ask: what a condition is, to be held to; None where that is not known.
    """

    def __init__(self, ask: Callable[[Tensor], bool | None]) -> None:
        super().__init__(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False)
        self._ask = ask
        self._read: dict[sympy.Symbol, Tensor] = {}

    def note(self, number: object, tensor: Tensor) -> None:
        """A number was read of a tensor."""
        symbol = number.node.expr if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None
        if isinstance(symbol, sympy.Eq):  # of a condition that torch's own Python reads, torch writes u0 = 1
            symbol = symbol.lhs
        if isinstance(symbol, sympy.Symbol):
            self._read[symbol] = tensor

    def evaluate_sym_node(self, sym_node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None) -> sympy.Basic:
        try:
            return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        except GuardOnDataDependentSymNode:
            told = self._told(sym_node.expr)
            if told is None:
                raise
            return sympy.true if told else sympy.false

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # torch's is cached, which its type says
        self, orig_expr: Any, msg: str, fx_node: torch.fx.Node | None = None
    ) -> bool:
        if self._told(orig_expr) is False:
            raise RuntimeError("a check of the model's fails")
        return super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)

    def _told(self, expression: sympy.Basic) -> bool | None:
        """What a condition that the traced code itself asks is told; None for others."""
        is_condition = isinstance(expression, (Relational, BooleanFunction))
        if not is_condition or expression.free_symbols.isdisjoint(self._read) or get_proxy_mode() is None:
            return None
        condition = self._value(expression)
        return self._ask(condition) if isinstance(condition, Tensor) else None

    def _value(self, expression: sympy.Basic) -> Value | None:
        """An expression, computed of the tensors that its numbers were read of; None for one of another kind."""
        if isinstance(expression, sympy.Symbol):
            return self._read[expression] if expression in self._read else self.create_symintnode(expression, hint=None)
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.Number):
            return float(expression)
        compute = _OPERATIONS.get(expression.func)
        values = [self._value(argument) for argument in expression.args]
        if compute is None or any(value is None for value in values):
            return None
        return reduce(compute, values) if len(values) > 1 else compute(*values)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    sympy.And: operator.and_,
    sympy.Or: operator.or_,
    sympy.Not: operator.invert,
}
