"""The entry of an operator, and helpers for the templates of rules.

A rule whose letters depend on the op's arguments is a *template*: it looks at the op (which dimension, how many, which reduction) and
writes its notation. Dimensions get letters ``a b c ...`` in order; words that begin with ``_`` name no axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase, ascii_uppercase
from typing import Any, Literal, Union

from whale.axes.notation import bind, parse
from whale.axes.outcome import Dims, Reading, RuleMisfit, RuleOutcome, argument, number, numbers
from whale.ir.graph import Argument, Op

Template = Callable[[Op, Reading], str]
Rule = Union[str, Callable[[Op, Reading], Union[str, RuleOutcome]]]
Shape = tuple[int, ...]
# from the arguments (shapes for tensors) and the shapes of the results; a multiply-add is 2
Flops = Callable[[Sequence[Any], Sequence[Shape]], int]

# what backward keeps: ``result`` (or a mask of its size), ``places`` (the origin of each element of the result), ``factors`` (what is
# multiplied by another tensor; a number is not kept)
Keeps = Literal["nothing", "inputs", "result", "inputs and result", "inputs and places", "factors"]

# what its result is where its operands are sums, means or counts over rows, or one value (`whale.axes.over_rows`)
Rows = Literal[
    # the elements of its first operand
    "same",  # in their places
    "moved",  # in others, some of them, or as another type
    "linear",  # combined with constant factors: ``cumsum``, ``trace``
    "negated",
    "sum",
    "mean",
    # two operands
    "added",
    "subtracted",
    "subtracted from",  # ``rsub``
    "multiplied",
    "divided",
    "product",  # sums of products: ``mm``, ``einsum``
    "interpolated",  # ``lerp``
    "copied",  # the second, in the place of the first
    "scattered",  # the first, to some elements of which others are added
    "put",  # likewise, if its argument ``accumulate`` says so
    # others
    "joined",  # the elements of several operands: ``cat``
    "filled",  # one number everywhere
    "shaped",  # constants, of which only the shape may follow from an operand: ``ones_like``
    "zeros",  # likewise, zeros
    "counted",  # a sum over all that it reads, of no linear function of it: ``count_nonzero``, ``bincount``
    "selected",  # the positions of what a mask selects
    # the order of values: of elements, or of the one operand that varies
    "greatest",
    "least",
    "rising",  # a greater operand makes no element smaller: ``gt``
    "falling",
    "bounded",  # ``clamp``: rising too
]

LINEAR: frozenset[Rows | None] = frozenset({"same", "moved", "linear", "negated", "sum", "mean"})
SHAPED: frozenset[Rows | None] = frozenset({"shaped", "zeros"})
"""Operators that read nothing of a tensor but its shape."""

# memory of an operand's gradient: its own; that of the result's gradient, if sizes are equal; none, since it is one number everywhere; or,
# of a view of a part, shared with the gradients of the other parts
Gradient = Literal["made", "handed on", "one number", "put together"]


@dataclass(frozen=True)
class Operator:
    """An operator. The defaults are those of an op that computes on parts as on the whole."""

    # what it does with the axes of its operands: one line of notation (`whale.axes.notation`), a template that writes it, or code; None if
    # unknown
    axes: Rule | None = None
    # how it computes on parts: a function of `whale.runtime.program.shard`, with its module. The default runs it unchanged, which fits if
    # no argument holds sizes or positions of a dimension that may be cut; None if unknown, which is refused.
    on_parts: str | None = "contractions.same"
    # name and position of the operand that is added to the product, once if the product is summed over devices
    added: tuple[str, int] | None = None
    flops: Flops | None = None  # of a product, if torch's own counter lacks it. Other ops cost one per element that they read or make.
    factors: tuple[int, ...] = (0, 1)  # positions of the operands of a product that are multiplied, unlike biases and masks
    looks_up: bool = False  # whether it reads of its source only as much as it returns
    # how it takes positions of its first operand: one tensor per dimension, in a list; or one, after the number of its dimension
    indexed: Literal["per dimension", "along one"] | None = None
    # its part in an attention core (`whale.planning.pipeline.segments`): a product of two activations, a softmax between such, or all
    core: Literal["product", "softmax", "all"] | None = None
    keeps: Keeps = "inputs"  # what its backward pass keeps
    gradient: Gradient = "made"  # the memory of the gradients of its operands
    # how its weight gradients are computed separately from the rest of its backward pass: a rule of `whale.deferred`; None if they are not
    weights: str | None = None
    by_place: bool = False  # whether its random numbers, where torch compiles, are functions of a seed and the place of each element
    is_two: bool = False  # whether it is two ops, with an intermediate result as large as its first operand
    rows: Rows | None = None  # what it makes of values that are combined over rows already; None if no sum, mean or count


Moves = partial(Operator, keeps="nothing")  # gradients need shapes and integers only

Family = Mapping[str, Operator]  # entries by operators, names without ``aten.``, with an overload if it differs from the others


def operand(op: Op, reading: Reading, position: int = 0) -> Dims:
    """The dimensions of a tensor argument that must exist."""
    dims = reading.tensor(op.args[position]) if position < len(op.args) else None
    if dims is None:
        raise RuleMisfit(f"its argument {position} is no tensor")
    return dims


def names(count: int, skip: int = 0) -> list[str]:
    letters = ascii_lowercase + ascii_uppercase
    if skip + count > len(letters):
        raise RuleMisfit(f"it has more than {len(letters)} dimensions")
    return list(letters[skip : skip + count])


def letters_of(op: Op, reading: Reading, position: int = 1, default: int | None = None) -> tuple[list[str], int]:
    """The letters of the first operand, and the number of the dimension that an argument names."""
    letters = names(len(operand(op, reading)))
    return letters, number(argument(op, position, "dim", default)) % len(letters)


def put(letters: Sequence[str], dim: int, *terms: str) -> list[str]:
    """The letters with these terms in place of one."""
    return [*letters[:dim], *terms, *letters[dim + 1 :]]


def write(operands: Iterable[tuple[str, Sequence[str]]], *results: Sequence[str]) -> str:
    """The notation of these operands and results."""
    left = " ".join(f"{name}[{' '.join(terms)}]" for name, terms in operands)
    return f"{left} -> {' '.join('[' + ' '.join(terms) + ']' for terms in results)}"


def bound(text: str, op: Op, reading: Reading) -> RuleOutcome:
    """The outcome of notation that a template has written, for what only code can add to it."""
    return bind(parse(text), op, reading)


def chosen(value: Argument, rank: int) -> tuple[int, ...]:
    """Dimension numbers from an argument, counted from the left; all dimensions for None or an empty list."""
    if value is None or value == ():
        return tuple(range(rank))
    return tuple(sorted(dim % rank for dim in numbers(value))) if rank else ()


def along(position: int = 1, default: int | None = None, name: str = "dim") -> Template:
    """An op that needs given dimensions whole and keeps the shape: ``input[a b!] -> [a b!]``."""

    def rule(op: Op, reading: Reading) -> str:
        rank = len(operand(op, reading))
        dims = chosen(argument(op, position, name, default), rank)
        terms = [letter + "!" if index in dims else letter for index, letter in enumerate(names(rank))]
        return write([("input", terms)], *[terms] * len(op.outputs))

    return rule
