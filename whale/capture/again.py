"""A model traced once more and compared with its capture: finds that its code computes something else by now, whatever it read.

What is near is watched by value (`whale.capture.exporting.near_values`). A class of another module, a global, os.environ, a context
variable, an iterator, a number that was read of a tensor: only what the code makes of them tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from whale.capture.exporting.functions import FunctionCall
from whale.capture.flat.row_constants import are_same
from whale.capture.program import Program
from whale.ir.graph import Argument, LossTerm, ModelGraph, Op
from whale.ir.source import SourceLine


@dataclass(frozen=True)
class Difference:
    """Where two captures part.

    Attributes:
        what: the op, and both of its constants.
        where: the user's line.
    """

    what: str
    where: SourceLine | None


def difference(then: tuple[ModelGraph, Program], now: tuple[ModelGraph, Program]) -> Difference | None:
    """The first place where two captures of one model differ; None where they compute the same."""
    for found in (_of_ops(then, now), _of_terms(then[0], now[0]), _of_outputs(then[1], now[1])):
        for each in found:
            return each
    return None


def _of_ops(then: tuple[ModelGraph, Program], now: tuple[ModelGraph, Program]) -> Iterator[Difference]:
    (graph, program), (other_graph, other_program) = then, now
    functions, other_functions = _functions(program), _functions(other_program)
    for op, other in zip_longest(graph.ops, other_graph.ops):
        if op is None or other is None:
            yield Difference(f"{other or 'nothing'}, captured: {op or 'nothing'}", (other or op).where)
        elif _form(op) != _form(other):
            yield Difference(_told(op, other), other.where)
        elif op.kind == "constant" and not are_same(program.tensors[op.name], other_program.tensors[other.name]):
            yield Difference(f"%{op.name} is another tensor", other.where or _reader(other_graph, op.name))
        elif functions.get(op.name) != other_functions.get(other.name):
            what = f"{other_functions.get(other.name)}, captured: {functions.get(op.name)}"
            yield Difference(f"%{op.name}: {what}", other.where)


def _functions(program: Program) -> dict[str, str]:
    """What tells custom functions apart: their names and plain arguments; code may make the rest anew for each call."""
    return {node.name: node.target.shown for node in program.graph.nodes if isinstance(node.target, FunctionCall)}


def _form(op: Op) -> str:
    return repr((op.name, op.kind, op.target, op.args, op.kwargs, op.outputs, op.requires_grad))  # in which a NaN equals itself


def _told(op: Op, other: Op) -> str:
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


def _reader(graph: ModelGraph, name: str) -> SourceLine | None:
    return next((op.where for op in graph.ops if name in op.inputs), None)


def _of_terms(graph: ModelGraph, other: ModelGraph) -> Iterator[Difference]:
    for term, now in zip_longest(graph.loss, other.loss):
        if term is None or now is None or repr(_plain(term)) != repr(_plain(now)):
            yield Difference(f"a term of the loss: {_shown(now)}, captured: {_shown(term)}", (now or term).where)


def _plain(term: LossTerm) -> LossTerm:
    return replace(term, where=None, reason="")


def _shown(term: LossTerm | None) -> str:
    return "none" if term is None else f"{term.coefficient!r} x %{term.sum}" + (f" + {term.offset!r}" if term.offset else "")


def _of_outputs(program: Program, other: Program) -> Iterator[Difference]:
    ours, theirs = ([] if each.outputs is None else list(each.outputs.parts) for each in (program, other))
    for (position, value), (other_position, now) in zip(ours, theirs, strict=False):
        is_plain = isinstance(value, (bool, int, float, str, type(None)))
        if position != other_position or (is_plain and repr(value) != repr(now)):
            yield Difference(f"a constant of the output: {now!r}, captured: {value!r}", None)
