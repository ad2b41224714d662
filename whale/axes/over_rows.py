"""How values combine over rows: what an op makes of them, by its operator's entry.

    x [b d] -> sum(0) [d] -> mean []       a sum: the values of parts of the batch add up
    x [b d] -> mean(0) [d] -> sum []       a mean: they are averaged by their rows
    x [b d] -> sum(0) [d] -> square        other
    x [b d] -> softmax(0) [b d] -> sum(0)  other: the softmax needs the rows whole

What an op does with rows follows from its rule: it keeps them, or sums, or averages over them. What it makes of values that have none any
more is the field ``rows``. The pass over a graph (`whale.axes.updates.OverRows`) and the loss, which is taken apart before the graph is a
value (`whale.capture.loss.facts`), read both here; masks that are known without a batch (`whale.capture.flat.masks`) read the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from whale.axes.atoms import ROWS, Atoms
from whale.axes.discover import Checker, read_call
from whale.axes.notation import parse
from whale.axes.operators import Operator
from whale.axes.operators.entry import LINEAR, Shape
from whale.axes.outcome import Reading
from whale.axes.selections import Selections
from whale.axes.values import Role
from whale.ir.graph import ModelGraph, Op

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


def roles_of_rows(op: Op, sources: Sequence[Op]) -> tuple[Role, ...]:
    """What one op does with rows, where nothing is known of the rest of its graph: by its rule, and the sizes of what it reads.

    Args:
        op: a call.
        sources: what it reads, as inputs. A dimension of as many elements as there are rows is of rows, as is one of a multiple.
    """
    graph, atoms = ModelGraph((*sources, op), (), ROWS), Atoms()
    batch = atoms.fresh(ROWS)
    reading = Reading(graph, atoms, batch, {}, set(), {}, Selections(graph, atoms))
    unknown: set[int] = set()
    for source in sources:
        sizes = [spec.shape_at(ROWS) for spec in source.outputs]
        reading.dims[source.name] = tuple(tuple(batch if size == ROWS else atoms.fresh(size) for size in shape) for shape in sizes)
        for spec, dims in zip(source.outputs, reading.dims[source.name], strict=True):
            unknown.update(leaf for dim, factor in zip(dims, spec.row_factors, strict=True) if factor < 0 for leaf in dim)
    outcome = read_call(op, reading)
    roles = Checker(atoms, unknown).roles(outcome.letters)
    return tuple(role for leaf, role in roles.items() if leaf in unknown or atoms.size((leaf,)) % ROWS == 0)


def operands_of(
    entry: Operator, arguments: Sequence[object], named: Mapping[str, object], is_tensor: Callable[[object], bool]
) -> tuple[list[object], list[object]]:
    """What an op reads, for `Combining`: its operands, those of lists one after another and a bias behind them; and its options.

    A tensor of which an op only takes the shape, to fill that with a number, is none of them.
    """
    operands = list(_flat(arguments[:1] if entry.rows == "joined" else arguments))
    bias, place = entry.added or ("", 0)
    operands += [named[bias]] if bias in named and place == len(operands) else []
    operands = [each for each in operands if not is_tensor(each)] if entry.rows == "filled" else operands
    return operands, [value for name, value in named.items() if name != bias]


def _flat(arguments: Iterable[object]) -> Iterator[object]:
    for each in arguments:
        if isinstance(each, (list, tuple)):
            yield from _flat(each)
        else:
            yield each


@dataclass(frozen=True, slots=True)
class Combining:
    """A call whose result has no rows.

    Attributes:
        entry: of its operator.
        operands: what it reads (`operands_of`); numbers and text are constant.
        shapes: of these; None for numbers and text.
        options: its other arguments.
        over_rows: how it combines rows (`whale.axes.mixing.combination`), if it reads some.
        accumulates: whether it adds to what was there, if that is an argument.
        rounds: whether it makes integers of numbers, or truths: of sums and means these are none.
        may_be_rows: whether constants may be the number of rows, in a capture for so many.
    """

    entry: Operator
    operands: Sequence[Kind]
    shapes: Sequence[Shape | None]
    options: Sequence[Kind] = ()
    over_rows: str = ""
    accumulates: bool = False
    rounds: bool = False
    may_be_rows: bool = False

    @property
    def kind(self) -> Kind | None:
        """What it makes; None for nothing that combines over rows."""
        if not self.reads_rows:
            return self._of_sums()
        if self.adds_rows:
            return joint((self.operands[0], "sum"))
        # what is added once would be added again by each part
        if not PER_ROW.issuperset((*self.operands, *self.options)) or self._added not in ("zero", None):
            return None
        how = "sum" if self.entry.rows == "counted" else self.over_rows
        return "sum" if how == "sum" else "mean" if how == "mean" else None

    @property
    def reads_rows(self) -> bool:
        return "rows" in self.operands or "rows" in self.options

    @property
    def adds_rows(self) -> bool:
        """Whether it adds sums over rows to elements of its first operand."""
        adds = self.entry.rows == "scattered" or (self.entry.rows == "put" and self.accumulates)
        is_apart = adds and self.reads_rows and PER_ROW.issuperset((*self.operands[1:], *self.options))
        return is_apart and self._adds_where_rows_meet

    @property
    def _added(self) -> Kind | None:
        place = self._place_added
        return self.operands[place] if place is not None and place < len(self.operands) else None

    @property
    def _place_added(self) -> int | None:
        """The operand that is added once, by the entry or by a rule of the user's."""
        if self.entry.added is not None or not isinstance(self.entry.axes, str):
            return self.entry.added and self.entry.added[1]
        return next((place for place, each in enumerate(parse(self.entry.axes).operands) if each.added), None)

    @property
    def _adds_where_rows_meet(self) -> bool:
        """Whether what is added has its rows where the places have theirs: row by row, and no row at the place of another."""
        first, *others = self.shapes
        found = [(kind, shape) for kind, shape in zip(self.operands[1:], others, strict=True) if shape is not None]
        if self.entry.indexed == "along one":
            return True  # as many places as what is added has elements there
        if self.entry.indexed is None:
            return len({shape for _, shape in found}) == 1 and all(kind == "rows" for kind, _ in found)
        *places, (kind, added) = found
        met = {shape for own, shape in places if own == "rows"}
        if first is None or len(met) != 1 or None in others[: len(found)]:
            return False
        (place,) = met
        behind = len(added) - (len(first) - len(places))  # without the dimensions that no place is given for
        return kind != "rows" or added[max(0, behind - len(place)) : max(0, behind)] == place

    def _of_sums(self) -> Kind | None:
        how, kinds = self.entry.rows, self.operands
        if not kinds or not CONSTANT.issuperset(self.options) or (self.rounds and how in LINEAR):
            return None
        if how == "filled":  # with a number
            return None if "other" in kinds else "sum" if "count" in kinds else "constant"
        if how == "joined":
            return joint(kinds)
        if how == "product":
            place = self._place_added
            product = self._product([kind for position, kind in enumerate(kinds) if position != place])
            return product if self._added is None or product is None else joint((product, self._added))
        num_operands = 1 if how in LINEAR else 2
        if how is None or len(kinds) < num_operands or not CONSTANT.issuperset(kinds[num_operands:]):
            return None
        if how in LINEAR:
            return kinds[0]
        left, right, *_ = kinds
        if how in ("added", "subtracted", "subtracted from", "interpolated"):
            return joint((left, right))
        if how == "multiplied":
            return self._product((left, right))
        if how == "divided" and right == "count":
            return "mean" if left == "sum" else None
        if how == "divided":
            return left if right in CONSTANT and (left in CONSTANT or not self.may_be_rows) else None
        return right if how == "copied" else None

    def _product(self, kinds: Sequence[Kind]) -> Kind | None:
        """The product of constants and one value that varies, or of a mean and the number of rows."""
        varying = sorted(kind for kind in kinds if kind not in CONSTANT)
        if len(varying) < 2:
            return "constant" if not varying else None if self.may_be_rows else varying[0]
        return "sum" if varying == ["count", "mean"] else None


def joint(kinds: Sequence[Kind]) -> Kind | None:
    """What values are whose elements are each of one of these kinds, or sums or differences of them."""
    met = set(kinds)
    if met == {"zero"}:
        return "zero"
    if met <= ADDITIVE | {"zero"}:
        return "sum"
    return None if not met <= AVERAGED else "mean" if "mean" in met else "constant"
