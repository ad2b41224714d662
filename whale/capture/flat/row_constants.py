"""Constants of a capture with fixed rows that are the number of rows in disguise: found by a second one, with twice the rows.

captured for 8 rows      mul(%x, 8), view(%x, [8, 3])
captured for 16 rows     mul(%x, 16), view(%x, [16, 3])
written as               mul(%x, %num_rows), view(%x, [%num_rows, 3])

What differs in no known way (a root, a largest of two) is written as a number of its own, ``pos(2.83)``, so that it is no constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeGuard

from torch import Tensor, fx

from whale.capture.flat.flatten import Flat
from whale.capture.flat.sizes import READS_ROWS, are_alike

_Number = int | float


def write_rows(flat: Flat, double: Flat) -> bool:
    """Writes constants that grow with the rows as what `num_rows` makes of them, in both graphs.

    Returns:
        Whether the graphs are alike op by op; where they are not, nothing can be compared and nothing is changed.
    """
    if not are_alike(flat.graph, double.graph):
        return False
    mine, theirs = RowNumbers(flat), RowNumbers(double)
    for node, other in zip(list(flat.graph.nodes), list(double.graph.nodes), strict=True):
        if not are_same(flat.constants.get(node.name), double.constants.get(other.name)):
            node.meta[READS_ROWS] = other.meta[READS_ROWS] = True
        if node.op == "call_function":
            args = _paired(node.args, other.args, mine, theirs)
            kwargs = _paired(node.kwargs, other.kwargs, mine, theirs)
            (node.args, other.args), (node.kwargs, other.kwargs) = args, kwargs
    flat.results, double.results = _paired(flat.results, double.results, mine, theirs)
    return True


def are_same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether two captures have the same tensor for a constant, NaN where the other has it; or both none."""
    if ours is theirs or ours is None or theirs is None:
        return ours is theirs
    return ours.shape == theirs.shape and bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


class RowNumbers:
    """Numbers that are made from `num_rows` in one graph, each once, in front of all ops."""

    def __init__(self, flat: Flat) -> None:
        self.rows = int(flat.rows.meta["val"])
        self._flat = flat
        self._made: dict[tuple[_Number, _Number], fx.Node] = {}
        self._last = flat.rows
        while self._last.next.op == "placeholder":
            self._last = self._last.next

    def linear(self, factor: int, constant: int) -> fx.Node:
        """``factor x rows + constant``."""
        if (factor, constant) not in self._made:
            made = self._flat.rows if factor == 1 else self._call(operator.mul, self._flat.rows, factor)
            self._made[factor, constant] = made if constant == 0 else self._call(operator.add, made, constant)
        return self._made[factor, constant]

    def fraction(self, numerator: _Number) -> fx.Node:
        """``numerator / rows``."""
        if (0, numerator) not in self._made:
            self._made[0, numerator] = self._call(operator.truediv, numerator, self._flat.rows)
        return self._made[0, numerator]

    def alone(self, number: _Number) -> fx.Node:
        """A number that depends on the rows in a way that is not known: of this number of rows alone."""
        return self._call(operator.pos, number)

    def _call(self, function: Callable[..., _Number], *operands: Any) -> fx.Node:
        values = [item.meta["val"] if isinstance(item, fx.Node) else item for item in operands]
        with self._flat.graph.inserting_after(self._last):
            node = self._flat.graph.call_function(function, operands)
        node.meta |= {"val": function(*values), READS_ROWS: True}
        self._last = node
        return node


def _paired(value: Any, other: Any, mine: RowNumbers, theirs: RowNumbers) -> tuple[Any, Any]:
    """Two arguments, the numbers in them that grow with the rows written so."""
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
    """How a number follows from the rows; None where that is in no known way."""
    if value == 2 * other:
        return lambda numbers: numbers.fraction(value * rows)
    factor, rest = divmod(other - value, rows)
    if rest or factor != int(factor) or value != int(value):
        return None
    return lambda numbers: numbers.linear(int(factor), int(value - factor * rows))
