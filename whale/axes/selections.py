"""Selected elements: how many there are depends on values, but each is of its own row.

    x [b d]   mask [b]      x[mask] [s d]                     the axis s counts as rows, because b does
    i = where(mask) [s]     x[i] [s d]                        positions along b look up what the mask selects
    y.index_add(0, i, f(x[i])) [b d]                          each row is made of its own elements

Masks that are computed alike select along one axis. An axis of two selections, or of a selection and something of known size, pairs
elements by their order: it depends on other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from functools import cached_property

from whale.axes.atoms import Atoms, Dim
from whale.ir.graph import Argument, ModelGraph, Op, Ref
from whale.ir.writes import written_storages

DEPTH = 4  # ops back from a mask that are compared


class Selections:
    """The axes of selected elements of one graph, and the ops that hold their positions or their number."""

    def __init__(self, graph: ModelGraph, atoms: Atoms) -> None:
        self._graph, self._atoms = graph, atoms
        self._axes: dict[object, tuple[Dim, tuple[Dim, ...]]] = {}
        # per op with positions of selected elements, the dimensions along which they are: one for each column or result, or one for all
        self.places: dict[str, tuple[Dim, ...]] = {}
        self.counts: set[str] = set()  # ops that make an integer of a number of selected elements

    def __bool__(self) -> bool:
        return bool(self._axes)

    def axis(self, op: Op, mask: str, over: tuple[Dim, ...], size: int) -> Dim:
        """The dimension of what a mask over these dimensions selects in an op; of another size than asked for where estimates differ."""
        is_written = self._graph.storage[mask] in self._written
        return self._axes.setdefault(op.name if is_written else self._value(mask, DEPTH), (self._atoms.fresh(size), over))[0]

    def read_number(self, op: Op, dims: Mapping[str, tuple[tuple[Dim, ...], ...]]) -> None:
        """Notes an op that makes an integer, if it may be a number of selected elements."""
        if self and any(name in self.counts or self._has_some(dims.get(name, ())) for name in op.inputs):
            self.counts.add(op.name)

    def leaves(self) -> frozenset[int]:
        return frozenset(leaf for dim, _ in self._axes.values() for leaf in self._atoms.leaves(dim))

    def plain(self, unknown: Collection[int]) -> frozenset[int]:
        """Of the axes, those of one selection and nothing else, given the leaves that have an unknown size everywhere."""
        found = [self._atoms.leaves(dim) for dim, _ in self._axes.values()]
        return frozenset(leaves[0] for leaves in found if len(leaves) == 1 and leaves[0] in unknown and found.count(leaves) == 1)

    def following(self, rows: Set[int]) -> frozenset[int]:
        """The leaves of what is selected along rows, or along what was selected so."""
        found = set(rows)
        for dim, over in self._axes.values():
            if not found.isdisjoint(self._inner(over)):
                found.update(self._atoms.leaves(dim))
        return frozenset(found - rows)

    def _inner(self, dims: Iterable[Dim]) -> Iterable[int]:
        for dim in dims:
            for leaf in self._atoms.leaves(dim):
                yield leaf
                yield from self._inner(self._atoms.pieces(leaf))

    def _has_some(self, results: Iterable[tuple[Dim, ...]]) -> bool:
        return not self.leaves().isdisjoint(leaf for dims in results for leaf in self._inner(dims))

    def _value(self, name: str, depth: int) -> object:
        """What a value is computed from: two that are equal have equal elements."""
        op = self._graph.by_name[name]
        is_written = any(self._graph.storage[each] in self._written for each in (name, *op.inputs))
        if not depth or op.kind != "call" or "random" in op.tags or is_written:
            return name
        return op.target, self._resolved(op.args, depth), self._resolved(op.kwargs, depth)

    def _resolved(self, argument: Argument | tuple[tuple[str, Argument], ...], depth: int) -> object:
        if isinstance(argument, tuple):
            return tuple(self._resolved(item, depth) for item in argument)
        return self._value(argument.op, depth - 1) if isinstance(argument, Ref) else (type(argument), argument)

    @cached_property
    def _written(self) -> frozenset[str]:
        return frozenset(storage for op in self._graph.ops for storage in written_storages(self._graph, op))
