"""Logical axes of a captured model: the atoms of all its tensor dimensions, unified over the whole graph.

One pass reads the ops (`reading`), then, once no atom changes any more, each op's letters are checked (`checks`) and
the axes get their names (`naming`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from whale.axes.atoms import ROWS, Atoms, Dim
from whale.axes.checks import Checker, leaves_of_unknown_size
from whale.axes.mixing import find_mixing
from whale.axes.naming import name_axes
from whale.axes.outcome import Dims, Outcome
from whale.axes.reading import read
from whale.axes.values import Axes, Axis, Concatenation, Dimension, OpAxes, Role, Whole
from whale.ir.graph import ModelGraph


def discover(graph: ModelGraph) -> Axes:
    """Finds the logical axes of a model.

    Args:
        graph: of any mode and any number of rows.

    Returns:
        The axes, what each op does with them, which parameters hold them, and which ops mix samples.
    """
    reading, outcomes = read(graph)
    checker = Checker(reading.atoms, leaves_of_unknown_size(graph, outcomes, reading.atoms))
    held = _held(graph, outcomes)
    names = name_axes(graph, outcomes, held, reading.batch, checker)
    show = _Names(names, reading.atoms)
    roles = {op: checker.roles(outcome.letters) for op, outcome in outcomes.items()}
    ops = {op: _op_axes(outcomes[op], roles[op], show) for op in outcomes}
    reasons = _reasons(graph, roles)
    of_rows = tuple(_rows(names, reading.atoms))
    return Axes(
        axes=tuple(Axis(name, _size(reading.atoms.size((leaf,)), graph.num_rows), reasons.get(leaf, ())) for leaf, name in names.items()),
        ops=MappingProxyType(ops),
        parameters=MappingProxyType({name: show.dimensions(dims) for name, dims in held.items()}),
        mixing=find_mixing(graph, ops, of_rows, reading.positions),
        positions=frozenset(reading.positions),
        of_rows=frozenset(of_rows),
    )


class _Names:
    """Turns dimensions of atoms into dimensions of named axes, each once."""

    def __init__(self, names: Mapping[int, str], atoms: Atoms) -> None:
        self._names = names
        self._atoms = atoms
        self._known: dict[Dim, Dimension] = {}

    def __getitem__(self, leaf: int) -> str:
        return self._names[leaf]

    def dimensions(self, dims: Dims) -> tuple[Dimension, ...]:
        return tuple(self.dimension(dim) for dim in dims)

    def dimension(self, dim: Dim) -> Dimension:
        found = self._known.get(dim)
        if found is None:
            found = self._known[dim] = tuple(self._factor(leaf) for leaf in self._atoms.leaves(dim))
        return found

    def _factor(self, leaf: int) -> str | Concatenation:
        pieces = self._atoms.pieces(leaf)
        return Concatenation(tuple(self.dimension(piece) for piece in pieces)) if pieces else self._names[leaf]


def _op_axes(outcome: Outcome, roles: Mapping[int, Role], names: _Names) -> OpAxes:
    outputs = tuple(names.dimensions(dims) for dims in outcome.results)
    return OpAxes(outputs, {names[leaf]: role for leaf, role in roles.items()})


def _held(graph: ModelGraph, outcomes: Mapping[str, Outcome]) -> dict[str, Dims]:
    """Per parameter or buffer that the graph reads, its dimensions."""
    found: dict[str, Dims] = {}
    for op in graph.ops:
        known = graph.parameter_by_name.get(op.target) if op.kind in ("parameter", "buffer") else None
        if known:
            found.setdefault(known.name, outcomes[op.name].results[0])
    return found


def _reasons(graph: ModelGraph, roles: Mapping[str, Mapping[int, Role]]) -> dict[int, tuple[Whole, ...]]:
    """Per leaf, the distinct reasons why it is whole, each with the first op that gives it."""
    found: dict[int, dict[tuple[str, str], Whole]] = {}
    for op in graph.ops:
        for leaf, role in roles.get(op.name, {}).items():
            if role.kind == "whole":
                found.setdefault(leaf, {}).setdefault((op.target, role.reason), Whole(op.name, op.target, role.reason, op.where))
    return {leaf: tuple(reasons.values()) for leaf, reasons in found.items()}


def _rows(names: Mapping[int, str], atoms: Atoms) -> Iterator[str]:
    """The batch, and other axes whose size depends on the number of rows."""
    return (name for leaf, name in names.items() if atoms.size((leaf,)) % ROWS == 0 and atoms.size((leaf,)))


def _size(size: int, num_rows: int) -> int:
    """A size with the example's number of rows in place of `ROWS`."""
    factor = 1
    while size and size % ROWS == 0:
        size //= ROWS
        factor *= num_rows
    return size * factor
