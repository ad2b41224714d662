"""The entry of an operator, and helpers for the templates of rules.

A rule whose letters depend on the op's arguments is a *template*: it looks at the op (which dimension, how many, which reduction) and
writes its notation. Dimensions get letters ``a b c ...`` in order; words that begin with ``_`` name no axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# what its result is where its operands are sums, means or counts over rows, or one value (`combined`)
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
    # others
    "joined",  # the elements of several operands: ``cat``
    "filled",  # one number everywhere
    "shaped",  # constants, of which only the shape may follow from an operand: ``ones_like``
    "zeros",  # likewise, zeros
    "counted",  # a sum over all that it reads, of no linear function of it: ``count_nonzero``, ``bincount``
    "selected",  # the positions of what a mask selects
    # a loss, reduced by its argument ``reduction``
    "element loss",  # of a value per element of the operands, which meet from the right
    "row loss",  # of a value per row of the operands
    "class loss",  # a mean by the weights of the targets that count
    # the order of values: of elements, or of the one operand that varies
    "greatest",
    "least",
    "rising",  # a greater operand makes no element smaller: ``gt``
    "falling",
    "bounded",  # ``clamp``: rising too
]

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
    gathers: bool = False  # whether it reads of its source only as much as it returns
    keeps: Keeps = "inputs"  # what its backward pass keeps
    gradient: Gradient = "made"  # the memory of the gradients of its operands
    # how its weight gradients are computed separately from the rest of its backward pass: a rule of `whale.deferred`; None if they are not
    weights: str | None = None
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


# What a value is, as a function of the rows of a part of the batch:
# constant   the same for any rows; zeros and old values of buffers (held) are distinguished
# rows       one value, or slice of values, per row
# count      an integer in proportion to the number of rows
# sum        parts add up to the whole
# mean       parts, averaged by their rows, give the whole: means over rows, and what is linear in them
# grown      a multiple of a buffer's old value, plus a sum
# other      none of these
Kind = Literal["zero", "held", "constant", "rows", "count", "sum", "mean", "grown", "other"]

CONSTANT: frozenset[Kind] = frozenset({"zero", "held", "constant"})
ADDITIVE: frozenset[Kind] = frozenset({"count", "sum"})
PER_ROW: frozenset[Kind] = frozenset({"rows", *CONSTANT})
AVERAGED: frozenset[Kind] = frozenset({"mean", *CONSTANT})
LINEAR: frozenset[Rows | None] = frozenset({"same", "moved", "linear", "negated", "sum", "mean"})
SHAPED: frozenset[Rows | None] = frozenset({"shaped", "zeros"})
"""Operators that read nothing of a tensor but its shape."""


def operands_of(entry: Operator, arguments: Sequence[object], named: Mapping[str, object]) -> tuple[list[object], list[object]]:
    """What an operator reads, for `combined`: its operands, those of lists one after another and a bias behind them; and other options."""
    operands = list(_flat(arguments[:1] if entry.rows == "joined" else arguments))
    bias, place = entry.added or ("", 0)
    operands += [named[bias]] if bias in named and place == len(operands) else []
    return operands, [value for name, value in named.items() if name != bias]


def _flat(arguments: Iterable[object]) -> Iterator[object]:
    for each in arguments:
        if isinstance(each, (list, tuple)):
            yield from _flat(each)
        else:
            yield each


def combined(entry: Operator, kinds: Sequence[Kind], *, may_be_rows: bool = False) -> Kind | None:
    """What an operator makes of counts, sums, means and constants; None for none of these.

    Args:
        entry: the operator.
        kinds: of its operands (`operands_of`); numbers and text are constant. None has a value per row.
        may_be_rows: whether constants may be the number of rows, in a capture for so many.
    """
    how = entry.rows
    if how == "filled":  # with a number, not with the operand whose shape it takes
        return None if "other" in kinds else "sum" if "count" in kinds else "constant"
    if how == "joined":
        return joint(kinds)
    if how == "product":
        place = len(kinds) if entry.added is None else entry.added[1]
        product = _product([kind for position, kind in enumerate(kinds) if position != place], may_be_rows)
        return product if place >= len(kinds) or product is None else joint((product, kinds[place]))
    num_operands = 1 if how in LINEAR else 2
    if how is None or len(kinds) < num_operands or not CONSTANT.issuperset(kinds[num_operands:]):
        return None
    if how in LINEAR:
        return kinds[0]
    left, right, *_ = kinds
    if how in ("added", "subtracted", "subtracted from", "interpolated"):
        return joint((left, right))
    if how == "multiplied":
        return _product((left, right), may_be_rows)
    if how == "divided" and right == "count":
        return "mean" if left == "sum" else None
    if how == "divided":
        return left if right in CONSTANT and (left in CONSTANT or not may_be_rows) else None
    return right if how == "copied" else None


def joint(kinds: Sequence[Kind]) -> Kind | None:
    """What values are whose elements are each of one of these kinds, or sums or differences of them."""
    met = set(kinds)
    if met == {"zero"}:
        return "zero"
    if met <= ADDITIVE | {"zero"}:
        return "sum"
    return None if not met <= AVERAGED else "mean" if "mean" in met else "constant"


def _product(kinds: Sequence[Kind], may_be_rows: bool) -> Kind | None:
    """The product of constants and one value that varies, or of a mean and the number of rows."""
    varying = sorted(kind for kind in kinds if kind not in CONSTANT)
    if len(varying) < 2:
        return "constant" if not varying else None if may_be_rows else varying[0]
    return "sum" if varying == ["count", "mean"] else None
