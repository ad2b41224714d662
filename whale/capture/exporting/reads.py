"""Reads of tensors by Python code during a capture: known values, branches that are tried, numbers.

    if labels.max() >= classes:          True:  raises at once, so the captured model goes on as for False,
        raise ValueError                        and every step checks that it is False
    if mask.any():                       True:  cannot be captured; so it goes on as for False, which every step checks:
        places = mask.nonzero()                 it mixes samples (`whale.axes.mixing`), as parts of a batch cannot decide for all
    if lengths.max().item() > 64: ...    reads a number u0 and asks u0 > 64, that is `lengths.max() > 64`; so does `torch._check`,
                                         and what torch's own functions ask in Python, which no mode sees
    x = f(x) if x.sum() > 0 else g(x)    both can be captured: the value is unknown, which is an error

A capture computes nothing, so a condition on a tensor is unknown. If only one of its values can be captured, the model takes that one.
A value that depends on no input, parameter, buffer or random number (a causal mask) is the same in every step, and is computed
during the trace.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from types import CodeType
from typing import Any, TypeVar

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from whale.capture.source import user_line
from whale.errors import CaptureError, OpFault
from whale.ir.scope import SourceLine

T = TypeVar("T")
_MARK = "whale way "  # prefix of the assertion's message that stands for a read during the trace, before its number

# torch's symbols for the number of rows, and for an unknown number, in an error's text
_ROWS, _NUMBER = re.compile(r"\bs\d+\b"), re.compile(r"\bz?u[fb]?\d+\b")

_Stack = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class ReadAnswer:
    """The value that one read of a tensor was given."""

    value: bool | None  # the answer; None if there was none
    where: SourceLine | None  # the user's line
    stack: _Stack  # the code that read, innermost first
    error: Exception | None = None  # the result of the other value; None before it has been tried
    at_once: bool = False  # whether `error` was raised before any operation: the read is a check and nothing else

    @property
    def other(self) -> str:
        """The result of the other value, for a message."""
        if not self.at_once:
            return ""
        text = next((line.strip() for line in str(self.error).splitlines() if line.strip()), "")
        text = _NUMBER.sub("a number", _ROWS.sub("rows", text))
        return f"{type(self.error).__name__}: {text}".removesuffix(": ")


def held(condition: Tensor, value: bool, other: str, where: str) -> Tensor:
    """Checks in every step that a condition has the value that the capture assumed. Raises OpFault."""
    if bool(condition) != value:
        if other:
            raise OpFault(f"the model refuses this batch ({other})", where=where or None)
        raise OpFault(
            f"a condition on a tensor is {not value} in this batch, but the model was captured for {value}",
            where=where or None,
            hint="use torch.where or masks in place of Python's if on tensors",
        )
    return condition


class ReadAnswers:
    """The reads of successive traces, and the value that each was given."""

    def __init__(self) -> None:
        self.last_number: SourceLine | None = None
        self._path: list[ReadAnswer] = []
        self._num_read = 0
        self._num_ops = 0
        self._is_unanswered = False
        self._checks: dict[_Stack, ReadAnswer] = {}

    @contextmanager
    def asked(self, is_known: Callable[[Tensor], bool]) -> Iterator[None]:
        """Around a run of the model's code, from its start: answers reads of tensors that are not known."""
        self._num_read = 0
        with _TruthReads(self, is_known):
            yield

    @contextmanager
    def unanswered(self) -> Iterator[None]:
        """Around a read without an answer: torch reads once more, of the number that it makes of the tensor."""
        self._is_unanswered = True
        try:
            yield
        finally:
            self._is_unanswered = False

    def op(self) -> None:
        self._num_ops += 1

    def read(self, condition: Tensor) -> bool | None:
        """The value that a condition is assumed to have, written into the trace as an assertion; None if it is unknown."""
        if self._is_unanswered:
            return None
        if self._num_read == len(self._path):
            stack = _stack()
            known = self._checks.get(stack)
            self._path.append(ReadAnswer(False, user_line(), stack) if known is None else known)
        answer = self._path[self._num_read]
        if answer.value is not None:
            truth = condition if condition.dtype == torch.bool else condition.ne(0)
            torch.ops.aten._assert_async.msg(truth, f"{_MARK}{self._num_read}")
        self._num_read += 1
        self._num_ops = 0
        return answer.value

    def find(self, attempt: Callable[[], T | Exception]) -> tuple[T | Exception, tuple[ReadAnswer, ...]]:
        """Traces (`attempt`) until each read has the value that can be captured, if only one can; the trace or error, and the answers."""
        result = self._search(attempt, [])
        answers, number = list(self._path), 0
        while not isinstance(result, Exception) and number < len(answers):
            answer = answers[number]
            if answer.value is not None and answer.error is None:
                other = self._search(attempt, [*answers[:number], replace(answer, value=not answer.value, error=_TRIED)])
                if isinstance(other, Exception):
                    answers[number] = self._settled(replace(answer, error=other, at_once=self._at_once))
                else:  # both lead to the end
                    result = self._search(attempt, [*answers[:number], replace(answer, value=None)])
                    answers = list(self._path)
            number += 1
        return result, tuple(answers)

    def _search(self, attempt: Callable[[], T | Exception], start: Sequence[ReadAnswer]) -> T | Exception:
        """The first trace that ends, of those whose reads start so; else the first error that is not a check's."""
        self._path = list(start)
        found: Exception | None = None
        while True:
            self._num_ops = 0
            result = attempt()
            if not isinstance(result, Exception):
                return result
            del self._path[self._num_read :]
            self._at_once = self._num_ops == 0 and bool(self._path)
            if found is None or self._found_at_once:
                found, self._found_at_once = result, self._at_once
            at_once = self._at_once
            while len(self._path) > len(start) and self._path[-1].error is not None:
                self._path.pop()
                at_once = False
            if len(self._path) == len(start) or self._path[-1].value is None:
                self._at_once = self._found_at_once
                return found
            last = self._path.pop()
            self._path.append(self._settled(replace(last, value=not last.value, error=result, at_once=at_once)))

    _at_once = False
    _found_at_once = False

    def _settled(self, answer: ReadAnswer) -> ReadAnswer:
        """A check keeps its answer wherever the same code reads again, as in a loop over layers."""
        if answer.at_once:
            self._checks[answer.stack] = answer
        return answer


class _TruthReads(TorchFunctionMode):
    def __init__(self, answers: ReadAnswers, is_known: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._answers, self._is_known = answers, is_known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TRUTHS or func in _NUMBERS:
            read = args[0] if args else kwargs["input"]
            is_truth = func in _TRUTHS or (func == torch.Tensor.item and read.dtype == torch.bool)
            if is_truth and read.numel() == 1 and not self._is_known(read):
                answer = self._answers.read(read)
                if answer is not None:
                    return answer
                with self._answers.unanswered():
                    return func(*args, **kwargs)
            if func in _NUMBERS and not self._is_known(read):
                self._answers.last_number = user_line()
        return func(*args, **kwargs)


_NUMBERS = (torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.tolist)
_TRUTHS = (torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero)
_TRIED = CaptureError("this answer is being tried")


def answer_of(node: fx.Node, answers: Sequence[ReadAnswer]) -> ReadAnswer | None:
    """The read for which a node of a trace stands; None for other nodes."""
    if node.target is not torch.ops.aten._assert_async.msg:
        return None
    message = str(node.args[1])
    return answers[int(message.removeprefix(_MARK))] if message.startswith(_MARK) else None


def _stack() -> _Stack:
    """The code that reads, up to the call of the model or its loss."""
    found = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != "whale.capture.exporting.wrapper":
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


LARGEST = 1 << 20  # elements of a tensor whose value is kept

_READ_NUMBER = torch.ops.aten._local_scalar_dense.default
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class KnownValues(TorchDispatchMode):
    """Answers reads of tensors made from plain numbers.

    Args:
        seen: called for every operation.
        read: called with every unknown number that is read of a tensor, and the tensor.
    """

    supports_higher_order_operators = True

    def __init__(self, seen: Callable[[], None] = lambda: None, read: Callable[[object, Tensor], None] = lambda _, __: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._read = seen, read
        self._values: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._unknown: dict[int, Tensor] = {}  # by memory, which is kept: what is made later lies elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        known = all(map(self.knows, tensors))
        if known and func is _READ_NUMBER:
            with _disable_current_modes():
                return self._values[tensors[0]].item()
        self._seen()
        result = func(*args, **kwargs)
        if func is _READ_NUMBER:
            self._read(result, tensors[0])
        if not known and func._schema.is_mutable:
            self._forget(tensors)
        elif known and not any(isinstance(leaf, _SYMBOLS) for leaf in leaves) and torch.Tag.nondeterministic_seeded not in func.tags:
            self._learn(func, args, kwargs, result)
        return result

    def knows(self, tensor: Tensor) -> bool:
        is_real = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" and tensor.numel() <= LARGEST
        if is_real and tensor not in self._values:
            with _disable_current_modes():
                self._values[tensor] = tensor.detach().clone()  # a number's tensor, or a constant of the code: it does not change
        value = self._values.get(tensor)
        return value is not None and _memory(value) not in self._unknown

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        """Marks as unknown what shares memory with tensors that an unknown value may have been written to."""
        known = [self._values[tensor] for tensor in tensors if tensor in self._values]
        self._unknown |= {_memory(value): value for value in known}

    def _learn(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Computes an op's results on the known values; views share memory as the traced tensors do."""
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not found or any(isinstance(tensor.numel(), torch.SymInt) or tensor.numel() > LARGEST for tensor in found):
            return
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = pytree.tree_map_only(Tensor, self._values.__getitem__, (args, kwargs))
            values = [leaf for leaf in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for tensor, value in zip(found, values, strict=True):
            self._values[tensor] = value


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


Value = Tensor | int | float | torch.SymInt | torch.SymFloat


class ReadNumbers(ShapeEnv):
    """A shape environment that passes conditions on numbers read of tensors to `ask`, which gives their value, or None if unknown."""

    def __init__(self, ask: Callable[[Tensor], bool | None]) -> None:
        super().__init__(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False)
        self._ask = ask
        self._read: dict[sympy.Symbol, Tensor] = {}

    def note(self, number: object, tensor: Tensor) -> None:
        symbol = number.node.expr if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None
        if isinstance(symbol, sympy.Eq):  # of a condition that torch's own Python reads, torch writes u0 = 1
            symbol = symbol.lhs
        if isinstance(symbol, sympy.Symbol):
            self._read[symbol] = tensor

    def evaluate_sym_node(self, sym_node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None) -> sympy.Basic:
        try:
            return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        except GuardOnDataDependentSymNode:
            answer = self._answer(sym_node.expr)
            if answer is None:
                raise
            return sympy.true if answer else sympy.false

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # torch's is cached, and typed so
        self, orig_expr: Any, msg: str, fx_node: torch.fx.Node | None = None
    ) -> bool:
        if self._answer(orig_expr) is False:
            raise RuntimeError("a check of the model's fails")
        return super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)

    def _answer(self, expression: sympy.Basic) -> bool | None:
        """The answer to a condition that the traced code itself asks; None for others."""
        is_condition = isinstance(expression, (Relational, BooleanFunction))
        if not is_condition or expression.free_symbols.isdisjoint(self._read) or get_proxy_mode() is None:
            return None
        condition = self._value(expression)
        return self._ask(condition) if isinstance(condition, Tensor) else None

    def _value(self, expression: sympy.Basic) -> Value | None:
        """An expression computed on the tensors that its numbers were read of; None if it has other functions."""
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
