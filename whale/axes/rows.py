"""How values combine over rows: the algebra, and one pass over a graph that says it of each value.

A value as a function of the rows of a part of the batch:

constant    the same for any rows; zeros and old values of buffers are distinguished
rows        one value, or slice of values, per row
count       an integer in proportion to the number of rows
sum         parts add up to the whole
mean        parts, averaged by their rows, give the whole: means over rows, and what is linear in them
grown       a multiple of a buffer's old value, plus a sum
other       none of these

What an operator does with rows themselves follows from its axes: it keeps them, or sums, or averages over them. What it makes of values
that have none any more is the field ``rows`` of its entry (`whale.axes.operators`):

    x [b d] -> sum(0) [d] -> mean []       a sum
    x [b d] -> mean(0) [d] -> sum []       a mean
    x [b d] -> sum(0) [d] -> square        other
    x [b d] -> softmax(0) [b d] -> sum(0)  other: the softmax needs the rows whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whale.axes.mixing import RowRoles
from whale.axes.operators import Operator, Rows, added_operand, entry_of_call
from whale.axes.outcome import argument
from whale.axes.values import Axes
from whale.ir.graph import ModelGraph, Op, Ref
from whale.ir.writes import written_storages

Kind = Literal["zero", "held", "constant", "rows", "count", "sum", "mean", "grown", "other"]

CONSTANT: frozenset[Kind] = frozenset({"zero", "held", "constant"})
ADDITIVE: frozenset[Kind] = frozenset({"count", "sum"})
PER_ROW: frozenset[Kind] = frozenset({"rows", *CONSTANT})
AVERAGED: frozenset[Kind] = frozenset({"mean", *CONSTANT})

LINEAR: frozenset[Rows | None] = frozenset({"same", "moved", "linear", "negated", "sum", "mean"})
SHAPED: frozenset[Rows | None] = frozenset({"shaped", "zeros"})
"""Operators that read nothing of a tensor but its shape."""


def operands_of(entry: Operator, arguments: Sequence[object]) -> Iterator[object]:
    """An operator's arguments in order, those of lists one after another; of several operands that are joined, these alone."""
    for each in arguments[:1] if entry.rows == "joined" else arguments:
        if isinstance(each, (list, tuple)):
            yield from operands_of(_NOTHING, each)
        else:
            yield each


_NOTHING = Operator()


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


@dataclass(frozen=True, slots=True)
class Of:
    """What a value is."""

    kind: Kind
    name: str = ""  # of ``held`` and ``grown``, the buffer; of ``other``, the first op that made it so
    scale: float = 1.0  # of ``held`` and ``grown``, the factor on the buffer's old value


class OverRows:
    """Walks the ops in order; records what each value is, and what each written memory then holds."""

    def __init__(self, graph: ModelGraph, axes: Axes) -> None:
        self._graph, self._roles = graph, RowRoles(graph, axes.in_rows)
        # a constant may be the number of rows in a capture for so many, unless it has found out which constants are
        self._may_be_rows = not graph.dynamic and not any(graph.users[op.name] for op in graph.ops if op.kind == "input" and not op.outputs)
        self._values: dict[str, Of] = {}
        self._memory: dict[str, tuple[int, Of]] = {}
        for position, op in enumerate(graph.ops):
            self._values[op.name] = self._source(op) if op.kind != "call" else self._call(op)
            for storage in written_storages(graph, op):
                self._memory[storage] = position, self._written(op, storage)

    def value(self, op: str) -> Of:
        return self._values[op]

    def in_memory(self, op: str) -> Of:
        """The final content of the memory of an op's result."""
        storage = self._graph.storage[op]
        return self._memory[storage][1] if storage in self._memory else self._values[storage]

    def is_all_of(self, name: str, buffer: str) -> bool:
        """Whether a result has the elements of a buffer in their places, in its memory."""
        return self._graph.storage[name] == buffer and self._place(name) == ()

    def _source(self, op: Op) -> Of:
        if op.kind == "buffer":
            return Of("held", self._graph.parameter_by_name[op.target].name)
        if self._roles.reason(op):
            return Of("other", op.name)
        if self._roles.has_rows(op.name):
            return Of("rows")
        return Of("count" if op.kind == "input" and not op.outputs else "constant")

    def _now(self, name: str) -> Of:
        """What a value is now: as it was made, or as it was written since."""
        position, of = self._memory.get(self._graph.storage[name], (-1, Of("constant")))
        return of if position > self._graph.position[name] else self._values[name]

    def _written(self, op: Op, storage: str) -> Of:
        """What a memory holds after an op has written all or part of it."""
        if "in_place" not in op.tags:  # running statistics
            return Of("other", op.name)
        written = self._values[op.name]
        before = self._memory[storage][1] if storage in self._memory else self._values[storage]
        if op.inputs[0] == storage or before == written or self.is_all_of(op.name, storage):
            return written
        kinds = {before.kind, written.kind}
        if kinds == {"held", "grown"} and before.scale == written.scale:
            return before if before.kind == "grown" else written
        if "rows" in kinds:
            return Of("rows") if kinds <= PER_ROW else Of("other", op.name)
        found = joint((before.kind, written.kind))
        return Of("other", op.name) if found is None else Of(found)

    def _call(self, op: Op) -> Of:
        entry, has_rows = entry_of_call(op.target), self._roles.has_rows(op.name)
        is_unknown = not has_rows and any(factor < 0 for spec in op.outputs for factor in spec.row_factors)
        is_unknown = is_unknown or self._roles.has_rows_twice(op.name)  # its size is in no proportion to the rows
        if entry.rows in SHAPED and not is_unknown:
            return Of("rows") if has_rows else Of("zero" if entry.rows == "zeros" else "constant")
        is_filled = entry.rows == "filled"  # of a tensor it takes the shape
        read = [self._now(name) for name in op.inputs if not (is_filled and self._graph.by_name[name].outputs)]
        bad = next((of for of in read if of.kind == "other"), None)
        if bad is not None or is_unknown:
            return bad or Of("other", op.name)
        kinds = {of.kind for of in read}
        if has_rows:
            sizes: set[Kind] = {"count"} if entry.rows in ("moved", "filled") else set()
            found = Of("rows") if kinds <= PER_ROW | sizes and not self._roles.reason(op) else None
        elif "rows" in kinds:
            found = self._of_rows(op, entry, read)
        else:
            found = self._of_constants(op, entry, read) if kinds <= CONSTANT else self._of_sums(op, entry)
        return found or Of("other", op.name)

    def _of_rows(self, op: Op, entry: Operator, read: Sequence[Of]) -> Of | None:
        """What an op that has no rows makes of values per row."""
        if self._roles.reads_positions(op):
            return None
        if entry.rows == "scattered" and PER_ROW.issuperset(of.kind for of in read[1:]):
            adds = op.operator != "index_put" or argument(op, 3, "accumulate") is True
            return self._added(op, read[0], Of("sum")) if adds else None
        added = added_operand(op)  # once, so parts would add it again
        if not PER_ROW.issuperset(of.kind for of in read) or (added is not None and self._now(added).kind != "zero"):
            return None
        how = "sum" if entry.rows == "counted" else self._roles.combination(op.name)
        return Of("sum") if how == "sum" else Of("mean") if how == "mean" else None

    def _of_constants(self, op: Op, entry: Operator, read: Sequence[Of]) -> Of:
        if entry.rows == "copied":
            return read[-1]
        if len(read) == 1 and read[0].kind == "held" and (factor := _factor(op, entry)) is not None:
            return replace(read[0], scale=read[0].scale * factor)
        return read[0] if read and (entry.rows == "same" or "view" in op.tags) else Of("constant")

    def _of_sums(self, op: Op, entry: Operator) -> Of | None:
        """What an op makes of sums, means, counts and constants."""
        operands = [self._of(each) for each in operands_of(entry, op.args)]
        others = {self._of(value).kind for name, value in op.kwargs if entry.added is None or name != entry.added[0]}
        if not operands or not others <= CONSTANT or "rounding_mode" in dict(op.kwargs) or (entry.rows in LINEAR and self._rounds(op)):
            return None
        if entry.rows == "copied":
            return self._copied(op, operands[1])
        share = argument(op, 2, "weight") if entry.rows == "interpolated" else 0
        if entry.rows in ("added", "subtracted", "interpolated") and isinstance(share, (int, float)):
            left = replace(operands[0], scale=operands[0].scale * (1 - share))
            return self._added(op, left, operands[1] if len(operands) > 1 else Of("constant"))
        if operands[0].kind == "grown" and (entry.rows == "same" or "view" in op.tags):
            return operands[0]
        kind = combined(entry, [of.kind for of in operands], may_be_rows=self._may_be_rows)
        return None if kind in (None, "grown") else Of("sum" if op.outputs and kind == "count" else kind)

    def _of(self, argument: object) -> Of:
        return self._now(argument.op) if isinstance(argument, Ref) else Of("constant")

    def _added(self, op: Op, left: Of, right: Of) -> Of | None:
        """The sum or difference of two values."""
        kind = joint((left.kind, right.kind))
        if kind is not None:
            return Of("count" if kind == "sum" and not op.outputs else kind)
        base, grows = (left, right) if left.kind in ("held", "grown") else (right, left)
        if base.kind not in ("held", "grown") or grows.kind not in ADDITIVE:
            return None
        if base is right and (entry_of_call(op.target).rows != "added" or op.kwargs):  # a factor ``alpha``
            return None
        return None if self._place(op.name) is None else Of("grown", base.name, base.scale)

    def _copied(self, op: Op, value: Of) -> Of | None:
        """A value written over the old one."""
        if value.kind == "sum":
            return None if self._graph.by_name[self._graph.storage[op.name]].kind == "buffer" else value
        is_there = value.kind == "grown" and self._place(op.inputs[0]) == self._place(op.inputs[1])
        return value if value.kind == "mean" or is_there else None

    def _place(self, name: str) -> tuple[str, ...] | None:
        """Where in a buffer lie the elements that a value has, or has added to: the views on the way; None if nowhere."""
        op = self._graph.by_name[name]
        if op.kind == "buffer":
            return ()
        if entry_of_call(op.target).rows in _IN_PLACES or "in_place" in op.tags:
            return next((place for place in map(self._place, op.inputs) if place is not None), None)
        outer = self._place(op.inputs[0]) if "view" in op.tags else None
        return None if outer is None else (*outer, f"{op.target} {op.args[1:]} {op.kwargs}")

    def _rounds(self, op: Op) -> bool:
        """Whether a change of dtype loses precision that sums and means need."""
        sources = [spec for name in op.inputs[:1] for spec in self._graph.by_name[name].outputs]
        return any("float" in a.dtype and "float" not in b.dtype for a, b in zip(sources, op.outputs, strict=False))


_IN_PLACES: frozenset[Rows | None] = frozenset({"same", "multiplied", "divided", "added", "subtracted", "interpolated"})
"""Operators each element of whose result is in the place of one of the first operand."""


def _factor(op: Op, entry: Operator) -> float | None:
    """The number that a product multiplies its one tensor by; None for any other op."""
    numbers = [each for each in op.args[:2] if isinstance(each, (int, float))]
    if entry.rows not in ("multiplied", "divided") or len(op.args) != 2 or len(numbers) != 1 or op.kwargs:
        return None
    if entry.rows == "divided":
        return 1 / numbers[0] if numbers[0] and op.args[1] is numbers[0] else None
    return float(numbers[0])
