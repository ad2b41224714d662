"""The axes of a model, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Union

from whale.ir.scope import SourceLine

RoleKind = Literal["kept", "pooled", "contracted", "whole", "broadcast"]


@dataclass(frozen=True, slots=True)
class Role:
    """What an op does with an axis."""

    # ``kept`` (each part of the result needs that part of the operands), ``pooled`` (that part, and statistics of all of it, for which
    # parts exchange their sums), ``contracted`` (results for parts are combined), ``broadcast`` (made by the op, any part alone) or
    # ``whole`` (not to be cut here)
    kind: RoleKind
    combine: str = ""  # how a contracted axis is combined: ``sum``, ``mean``, ``lookup``,
    reason: str = ""  # for a whole axis, why; for one that the op makes, why a part alone would have other values
    # operands that every part needs whole, though they have the axis, by name and position: keys and values, for some of the queries
    gathers: tuple[tuple[str, int], ...] = ()
    grows: bool = False  # whether the work for an element grows with its position, as under a causal mask

    def __str__(self) -> str:
        gathered = f", {' and '.join(name for name, _ in self.gathers)} whole" if self.gathers and self.kind == "kept" else ""
        return self.kind + (f" by {self.combine}" if self.combine else "") + (f": {self.reason}" if self.reason else "") + gathered


@dataclass(frozen=True, slots=True)
class WholeReason:
    """Why an axis cannot be cut: one op that needs it whole."""

    op: str
    target: str  # what the op computes
    reason: str  # what it does with the axis
    where: SourceLine | None  # the user's line

    def __str__(self) -> str:
        return f"{self.target} {self.reason} (%{self.op}{f' at {self.where}' if self.where else ''})"


@dataclass(frozen=True, slots=True)
class Axis:
    """A logical axis of the model."""

    name: str
    size: int  # at the example's number of rows
    whole: tuple[WholeReason, ...] = ()  # why it cannot be cut everywhere, one entry per distinct reason; empty for an axis that may be cut
    # whether a part has elements from both ends, so that parts of equal sizes are equal work where it grows with the position
    is_folded: bool = False

    @property
    def may_be_cut(self) -> bool:
        return not self.whole


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Dimensions one after another, as one factor of a dimension."""

    pieces: tuple[tuple[Factor, ...], ...]

    def __str__(self) -> str:
        return "(" + " | ".join(show_dimension(piece) for piece in self.pieces) + ")"


Factor = Union[str, Concatenation]  # an axis, or a concatenation

Dimension = tuple[Factor, ...]  # an ordered product, outermost first; empty for size 1


def show_dimension(dimension: Dimension) -> str:
    """A dimension in the style of the rules: ``3*heads*head_dim``."""
    return "*".join(str(factor) for factor in dimension) or "1"


@dataclass(frozen=True, slots=True)
class OpAxes:
    """The dimensions of an op's results, and what it does with each axis that it meets."""

    outputs: tuple[tuple[Dimension, ...], ...]
    roles: Mapping[str, Role]

    def __str__(self) -> str:
        results = " ".join("[" + " ".join(show_dimension(d) for d in dims) + "]" for dims in self.outputs)
        marked = ", ".join(f"{axis} {role}" for axis, role in self.roles.items() if role.kind != "kept" or role.gathers)
        return results + (f"  {marked}" if marked else "")


@dataclass(frozen=True, slots=True)
class InRows:
    """What of a graph is known of its rows."""

    ops: Mapping[str, OpAxes]  # what each op does with each axis
    rows: Set[str]  # the batch, every other axis whose size depends on the number of rows, and what is selected from these
    positions: Mapping[str, tuple[Dimension, ...]]  # per op that holds positions, the dimensions along which they are
    selected: Set[str] = frozenset()  # axes of what one mask selects
    uncounted: Set[str] = frozenset()  # of the rows, axes of which only values say how many there are


@dataclass(frozen=True, slots=True)
class Mixing:
    """An op whose result for one sample depends, or may depend, on other samples."""

    op: str
    reason: str  # what it does with the batch
    where: SourceLine | None  # the user's line
    kind: Literal["mixes", "no rule"]  # ``mixes``, or ``no rule`` if the op has none and nobody knows

    def __str__(self) -> str:
        return f"%{self.op} {self.reason}" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Axes:
    """The logical axes of a model."""

    axes: tuple[Axis, ...]  # in the order in which the graph meets them; the batch, if there is one, first
    ops: Mapping[str, OpAxes]  # per op that makes tensors, their dimensions and what it does with each axis
    parameters: Mapping[str, tuple[Dimension, ...]]  # per parameter or buffer, the axes of its dimensions
    mixing: tuple[Mixing, ...]  # ops for which a cut of the batch may change numbers, except the reductions of the loss
    # ops with values 0, 1, ... along their axis; a part of a cut axis keeps its positions in the whole, and as an index is local.
    positions: frozenset[str] = frozenset()
    of_rows: frozenset[str] = frozenset()  # axes whose size follows the number of rows: the batch, and others that are not known to be it
    in_rows: InRows = InRows({}, frozenset(), {})  # the same with what masks select from rows

    @cached_property
    def by_name(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

    @cached_property
    def folded(self) -> frozenset[str]:
        """The axes of which a part has elements from both ends."""
        return frozenset(axis.name for axis in self.axes if axis.is_folded)

    def in_results(self, op: str) -> frozenset[str]:
        known = self._in_results.get(op)
        if known is None:
            made = self.ops.get(op)
            known = frozenset(axis for dims in made.outputs for dim in dims for axis in axes_of(dim)) if made else frozenset()
            self._in_results[op] = known
        return known

    @cached_property
    def _in_results(self) -> dict[str, frozenset[str]]:
        return {}

    @cached_property
    def in_parameters(self) -> Mapping[str, frozenset[str]]:
        """Per parameter or buffer, the axes in its dimensions."""
        return {name: frozenset(axis for dim in dims for axis in axes_of(dim)) for name, dims in self.parameters.items()}

    @cached_property
    def held_by(self) -> dict[str, tuple[str, ...]]:
        """Per axis, the parameters' dimensions that have it, as ``h.0.mlp.c_fc.weight:1``."""
        found: dict[str, list[str]] = {axis.name: [] for axis in self.axes}
        for parameter, dimensions in self.parameters.items():
            for index, dimension in enumerate(dimensions):
                for axis in dict.fromkeys(axes_of(dimension)):
                    found[axis].append(f"{parameter}:{index}")
        return {axis: tuple(holders) for axis, holders in found.items()}

    def __str__(self) -> str:
        lines = ["axes:"]
        for axis in self.axes:
            lines.append(f"  {axis.name}: {axis.size}" + ("" if axis.may_be_cut else f"  whole: {'; '.join(map(str, axis.whole))}"))
        lines.append("parameters:")
        for name, dimensions in self.parameters.items():
            lines.append(f"  {name} [{' '.join(show_dimension(d) for d in dimensions)}]")
        lines += ["mixing:", *(f"  {mixing}" for mixing in self.mixing)] if self.mixing else []
        return "\n".join(lines)


def axes_of(dimension: Dimension) -> tuple[str, ...]:
    """The axes in a dimension, including those in concatenated pieces, in order; one may occur twice."""
    found: list[str] = []
    for factor in dimension:
        if isinstance(factor, str):
            found.append(factor)
        else:
            for piece in factor.pieces:
                found += axes_of(piece)
    return tuple(found)


def renamed(dimensions: tuple[Dimension, ...], names: Mapping[str, str]) -> tuple[Dimension, ...]:
    return tuple(
        tuple(names[factor] if isinstance(factor, str) else Concatenation(renamed(factor.pieces, names)) for factor in dimension)
        for dimension in dimensions
    )


def may_lie_in_parts(dimensions: tuple[Dimension, ...], axis: str) -> bool:
    """Whether a tensor can be held in parts of an axis: it has the axis once (parts of two would be the diagonal blocks only)."""
    found = [dimension for dimension in dimensions if axis in axes_of(dimension)]
    return len(found) == 1 and _comes_once(found[0], axis)


def _comes_once(dimension: Dimension, axis: str) -> bool:
    counts = [1 if factor == axis else 0 if isinstance(factor, str) else _pieces_have(factor, axis) for factor in dimension]
    return sum(counts) == 1


def _pieces_have(factor: Concatenation, axis: str) -> int:
    """0 if no piece has the axis, 1 if each has it once, else 2."""
    have = [axis in axes_of(piece) for piece in factor.pieces]
    if not any(have):
        return 0
    return 1 if all(have) and all(_comes_once(piece, axis) for piece in factor.pieces) else 2
