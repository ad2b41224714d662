"""Two captures of one model compared: whether its code computes the same, and which constants follow from the number of rows.

captured for 8 rows      mul(%x, 8), view(%x, [8, 3])
captured for 16 rows     mul(%x, 16), view(%x, [16, 3])
written as               mul(%x, %num_rows), view(%x, [%num_rows, 3])

A number that follows in no known way (a root, a maximum) becomes a node of its own, ``pos(2.83)``, so that it is no constant.
Values near the model are watched directly (`whale.capture.exporting.near_values`). Changes of anything else (a class of another
module, a global, os.environ, a context variable, an iterator) show only in the graph when the code is traced again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from whale.capture.exporting.functions import FunctionCall
from whale.capture.flat.flatten import Flat
from whale.capture.flat.sizes import READS_ROWS, have_same_ops
from whale.capture.program import CapturedProgram
from whale.ir.graph import Argument, LossTerm, ModelGraph, Op
from whale.ir.scope import SourceLine


@dataclass(frozen=True)
class Difference:
    """Where two captures differ: the op with both of its constants, and the user's line."""

    what: str
    where: SourceLine | None


def difference(then: tuple[ModelGraph, CapturedProgram], now: tuple[ModelGraph, CapturedProgram]) -> Difference | None:
    """The first difference of two captures of one model; None if they compute the same."""
    for found in (_of_ops(then, now), _of_terms(then[0], now[0]), _of_outputs(then[1], now[1])):
        for each in found:
            return each
    return None


def _of_ops(then: tuple[ModelGraph, CapturedProgram], now: tuple[ModelGraph, CapturedProgram]) -> Iterator[Difference]:
    (graph, program), (other_graph, other_program) = then, now
    functions, other_functions = _functions(program), _functions(other_program)
    for op, other in zip_longest(graph.ops, other_graph.ops):
        if op is None or other is None:
            yield Difference(f"{other or 'nothing'}, captured: {op or 'nothing'}", (other or op).where)
        elif _form(op) != _form(other):
            yield Difference(_described(op, other), other.where)
        elif op.kind == "constant" and not are_same(program.tensors[op.name], other_program.tensors[other.name]):
            yield Difference(f"%{op.name} is another tensor", other.where or reader(other_graph, op.name))
        elif functions.get(op.name) != other_functions.get(other.name):
            what = f"{other_functions.get(other.name)}, captured: {functions.get(op.name)}"
            yield Difference(f"%{op.name}: {what}", other.where)


def _functions(program: CapturedProgram) -> dict[str, str]:
    """Names and plain arguments of custom functions; the rest may be new objects in each call."""
    return {node.name: node.target.shown for node in program.graph.nodes if isinstance(node.target, FunctionCall)}


def _form(op: Op) -> str:
    return repr((op.name, op.kind, op.target, op.args, op.kwargs, op.outputs, op.requires_grad))  # in which a NaN equals itself


def _described(op: Op, other: Op) -> str:
    if (op.name, op.target, len(op.args)) == (other.name, other.target, len(other.args)):
        pairs = zip(_constants((op.args, _values(op))), _constants((other.args, _values(other))), strict=False)
        for mine, theirs in pairs:
            if repr(mine) != repr(theirs):
                return f"%{op.name}, {op.target}: {theirs!r}, captured: {mine!r}"
    return f"{other}, captured: {op}"


def _values(op: Op) -> Argument:
    return tuple(value for _, value in op.kwargs)


def _constants(argument: Argument) -> Iterator[Argument]:
    if isinstance(argument, tuple):
        for item in argument:
            yield from _constants(item)
    else:
        yield argument


def reader(graph: ModelGraph, name: str) -> SourceLine | None:
    """The user's line of the first op that reads another."""
    return next((op.where for op in graph.ops if name in op.inputs), None)


def _of_terms(graph: ModelGraph, other: ModelGraph) -> Iterator[Difference]:
    for term, now in zip_longest(graph.loss, other.loss):
        if term is None or now is None or repr(_plain(term)) != repr(_plain(now)):
            yield Difference(f"a term of the loss: {_shown(now)}, captured: {_shown(term)}", (now or term).where)


def _plain(term: LossTerm) -> LossTerm:
    return replace(term, where=None, reason="")


def _shown(term: LossTerm | None) -> str:
    return "none" if term is None else f"{term.coefficient!r} x %{term.sum}" + (f" + {term.offset!r}" if term.offset else "")


def _of_outputs(program: CapturedProgram, other: CapturedProgram) -> Iterator[Difference]:
    ours, theirs = ([] if each.outputs is None else list(each.outputs.parts) for each in (program, other))
    for (position, value), (other_position, now) in zip(ours, theirs, strict=False):
        is_plain = isinstance(value, (bool, int, float, str, type(None)))
        if position != other_position or (is_plain and repr(value) != repr(now)):
            yield Difference(f"a constant of the output: {now!r}, captured: {value!r}", None)
    if str(program.whole) != str(other.whole):
        yield Difference(f"the last ops of an output: {other.whole}, captured: {program.whole}", None)


_Number = int | float


def write_rows(flat: Flat, double: Flat) -> bool:
    """Replaces constants that grow with the rows by nodes, in both graphs; False if the graphs differ in ops, then unchanged."""
    if not have_same_ops(flat.graph, double.graph):
        return False
    mine, theirs = RowNumbers(flat), RowNumbers(double)
    for node, other in zip(list(flat.graph.nodes), list(double.graph.nodes), strict=True):
        is_same = are_same(flat.constants.get(node.name), double.constants.get(other.name))
        if not is_same and not _write_constant(node, other, mine, theirs):
            node.meta[READS_ROWS] = other.meta[READS_ROWS] = True
        if node.op == "call_function":
            args = _paired(node.args, other.args, mine, theirs)
            kwargs = _paired(node.kwargs, other.kwargs, mine, theirs)
            (node.args, other.args), (node.kwargs, other.kwargs) = args, kwargs
    flat.results, double.results = _paired(flat.results, double.results, mine, theirs)
    return True


def _write_constant(node: fx.Node, other: fx.Node, mine: RowNumbers, theirs: RowNumbers) -> bool:
    """Makes a constant tensor of one number, ``torch.tensor(float(n))``, from the rows, where it follows from them; False elsewhere."""
    values = [numbers.constant(each) for numbers, each in ((mine, node), (theirs, other))]
    if not all(map(_is_number, values)) or (write := _growth(values[0], values[1], mine.rows)) is None:  # type: ignore[arg-type]
        return False
    for numbers, each in ((mine, node), (theirs, other)):
        each.replace_all_uses_with(numbers.tensor(write(numbers), each.meta["val"]))
    return True


def are_same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether two constants are equal (NaN equals NaN), or both None."""
    if ours is theirs or ours is None or theirs is None:
        return ours is theirs
    return ours.shape == theirs.shape and bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


class RowNumbers:
    """Numbers made from `num_rows` in one graph, each once, before all ops."""

    def __init__(self, flat: Flat) -> None:
        self.rows = int(flat.rows.meta["val"])
        self._flat = flat
        self._made: dict[tuple[_Number, _Number], fx.Node] = {}
        self._last = flat.rows
        while self._last.next.op == "placeholder":
            self._last = self._last.next

    def linear(self, factor: int, constant: int) -> fx.Node:
        if (factor, constant) not in self._made:
            made = self._flat.rows if factor == 1 else self._call(operator.mul, self._flat.rows, factor)
            self._made[factor, constant] = made if constant == 0 else self._call(operator.add, made, constant)
        return self._made[factor, constant]

    def fraction(self, numerator: _Number) -> fx.Node:
        if (0, numerator) not in self._made:
            self._made[0, numerator] = self._call(operator.truediv, numerator, self._flat.rows)
        return self._made[0, numerator]

    def alone(self, number: _Number) -> fx.Node:
        """A number that depends on the rows in an unknown way, and so holds for this number of rows alone."""
        return self._call(operator.pos, number)

    def constant(self, node: fx.Node) -> _Number | None:
        """The number in a constant tensor of no dimensions; None for any other node."""
        value = self._flat.constants.get(node.name)
        is_known = value is not None and value.dim() == 0 and not isinstance(value, FakeTensor) and not value.is_complex()
        return value.item() if value is not None and is_known else None

    def tensor(self, number: fx.Node, like: Tensor) -> fx.Node:
        """A tensor of no dimensions with a number."""
        with self._flat.graph.inserting_after(self._last):
            node = self._flat.graph.call_function(torch.ops.aten.scalar_tensor.default, (number,), {"dtype": like.dtype})
        node.meta["val"] = like
        self._last = node
        return node

    def _call(self, function: Callable[..., _Number], *operands: Any) -> fx.Node:
        values = [item.meta["val"] if isinstance(item, fx.Node) else item for item in operands]
        with self._flat.graph.inserting_after(self._last):
            node = self._flat.graph.call_function(function, operands)
        node.meta |= {"val": function(*values), READS_ROWS: True}
        self._last = node
        return node


def _paired(value: Any, other: Any, mine: RowNumbers, theirs: RowNumbers) -> tuple[Any, Any]:
    """Two arguments with the numbers that grow with the rows replaced by nodes."""
    if isinstance(value, (tuple, list)) and isinstance(other, (tuple, list)) and len(value) == len(other):
        pairs = [_paired(a, b, mine, theirs) for a, b in zip(value, other, strict=True)]
        return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    if isinstance(value, dict):
        found = {key: _paired(value[key], other[key], mine, theirs) for key in value}
        return {key: pair[0] for key, pair in found.items()}, {key: pair[1] for key, pair in found.items()}
    if not _is_number(value) or not _is_number(other) or value == other or (value != value and other != other):
        return value, other
    write = _growth(value, other, mine.rows)
    return (mine.alone(value), theirs.alone(other)) if write is None else (write(mine), write(theirs))


def _is_number(value: object) -> TypeGuard[_Number]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _growth(value: _Number, other: _Number, rows: int) -> Callable[[RowNumbers], fx.Node] | None:
    """How a number follows from the rows; None if in no known way."""
    if value == 2 * other:
        return lambda numbers: numbers.fraction(value * rows)
    factor, rest = divmod(other - value, rows)
    if rest or factor != int(factor) or value != int(value):
        return None
    return lambda numbers: numbers.linear(int(factor), int(value - factor * rows))
