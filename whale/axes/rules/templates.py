"""What templates share: rules whose notation depends on an op's arguments.

A template looks at the op (which dimension, how many, which reduction) and writes its rule. Dimensions get letters
``a b c ...`` in order; words that begin with ``_`` name no axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from string import ascii_lowercase, ascii_uppercase

from whale.axes.outcome import Dims, Misfit, Reading, argument, numbers
from whale.ir.graph import Argument, Op

Template = Callable[[Op, Reading], str]


def operand(op: Op, reading: Reading, position: int = 0) -> Dims:
    """A tensor argument that must be there."""
    dims = reading.tensor(op.args[position]) if position < len(op.args) else None
    if dims is None:
        raise Misfit(f"its argument {position} is no tensor")
    return dims


def names(count: int, skip: int = 0) -> list[str]:
    """That many letters."""
    letters = ascii_lowercase + ascii_uppercase
    if skip + count > len(letters):
        raise Misfit(f"it has more than {len(letters)} dimensions")
    return list(letters[skip : skip + count])


def write(operands: Iterable[tuple[str, Sequence[str]]], *results: Sequence[str]) -> str:
    """The notation of these operands and results."""
    left = " ".join(f"{name}[{' '.join(terms)}]" for name, terms in operands)
    return f"{left} -> {' '.join('[' + ' '.join(terms) + ']' for terms in results)}"


def chosen(value: Argument, rank: int) -> tuple[int, ...]:
    """Dimension numbers from an argument, counted from the left; all dimensions for None or an empty list."""
    if value is None or value == ():
        return tuple(range(rank))
    return tuple(sorted(dim % rank for dim in numbers(value))) if rank else ()


def along(mark: str, position: int = 1, default: int | None = None, name: str = "dim", num_results: int = 1) -> Template:
    """An op that works along given dimensions and keeps the shape: ``input[a b!] -> [a b!]``."""

    def rule(op: Op, reading: Reading) -> str:
        rank = len(operand(op, reading))
        dims = chosen(argument(op, position, name, default), rank)
        terms = [letter + mark if index in dims else letter for index, letter in enumerate(names(rank))]
        return write([("input", terms)], *[terms] * num_results)

    return rule
