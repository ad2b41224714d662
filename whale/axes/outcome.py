"""The outcome of a rule for one op: the dimensions of its results, and its letters bound to dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whale.axes.atoms import ROWS, Atoms, Dim
from whale.axes.selections import Selections
from whale.axes.values import Role
from whale.ir.graph import Argument, ModelGraph, Op, Ref, TensorSpec

Dims = tuple[Dim, ...]  # the dimensions of one tensor

KEPT = Role("kept")
BROADCAST = Role("broadcast")
NUMBERS = Role("broadcast", reason="makes values from their positions")
READS_ROWS = Role("whole", reason="computes with the number of rows")
NO_RULE = Role("whole", reason="has no rule")
READS = Role("whole", reason="reads all of it at once")
MAKES = Role("whole", reason="makes all of it at once")
CLASHES = Role("whole", reason="regroups it in factors that do not fit")
TWICE = Role("whole", reason="meets it twice")
CONTRACTED_AND_KEPT = Role("whole", reason="meets it twice, contracted and kept")


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter of a rule, bound to the dimension that it stands for in this op."""

    name: str
    role: Role
    dim: Dim


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    results: tuple[Dims, ...]
    letters: tuple[Letter, ...]
    is_position: bool = False
    places: Dims = ()  # of positions of selected elements, the dimensions along which they are (`Selections.places`)


class RuleMisfit(Exception):
    """A rule does not fit the op's shapes or arguments; the message says how."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A slice that tiles a dimension with others."""

    sizes: tuple[int, ...]  # of all tiles, in order
    index: int  # of this slice


@dataclass(slots=True)
class Reading:
    """The graph as read so far: what families of rules may look at."""

    graph: ModelGraph
    atoms: Atoms
    batch: Dim  # the batch axis; empty if no input has it
    dims: dict[str, tuple[Dims, ...]]  # per op, the dimensions of its results
    positions: set[str]  # ops that hold positions along their one dimension
    tilings: Mapping[str, Tiling]  # slices that tile a dimension together with others
    selections: Selections

    def tensor(self, argument: Argument) -> Dims | None:
        """The dimensions of a tensor argument; None for any other argument."""
        if isinstance(argument, Ref):
            results = self.dims.get(argument.op, ())
            return results[0] if len(results) == 1 else None
        return None

    def tensors(self, op: Op) -> list[Dims]:
        """The dimensions of all tensors that an op reads, in argument order."""
        return [dims for name in op.inputs for dims in self.dims.get(name, ())]

    def tensors_of(self, argument: Argument) -> list[Dims]:
        """The dimensions of the tensors in a list argument."""
        listed = argument if isinstance(argument, tuple) else (argument,)
        return [dims for item in listed if (dims := self.tensor(item)) is not None]

    def rows_read(self, op: Op, first: int = 0) -> tuple[Letter, ...]:
        """The batch as a letter of an op that takes the number of rows as a value: then every sample depends on that number."""
        values = [*op.args[first:], *(value for _, value in op.kwargs)]
        return (Letter("rows", READS_ROWS, self.batch),) if any(self._is_row_count(value) for value in values) else ()

    def _is_row_count(self, argument: Argument) -> bool:
        if not isinstance(argument, Ref):
            return False
        op = self.graph.by_name[argument.op]
        return not op.outputs and (op.kind == "input" or "reads_rows" in op.tags or op.name in self.selections.counts)

    def is_position(self, argument: Argument) -> bool:
        """Whether an argument holds the positions 0, 1, ... along its one dimension."""
        return isinstance(argument, Ref) and argument.op in self.positions

    def places(self, argument: Argument) -> Dims:
        """Along which dimensions an argument holds positions of selected elements."""
        return self.selections.places.get(argument.op, ()) if isinstance(argument, Ref) else ()

    def fresh(self, spec: TensorSpec) -> Dims:
        return tuple(self.atoms.fresh(size) for size in spec.shape_at(ROWS))

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Sizes, with `ROWS` for the rows of the batch."""
        return tuple(self.atoms.size(dim) for dim in dims)


def argument(op: Op, position: int, name: str, default: Argument = None) -> Argument:
    if position < len(op.args):
        return op.args[position]
    return next((value for key, value in op.kwargs if key == name), default)


def number(value: Argument) -> int:
    """An argument that must be a known integer, else `RuleMisfit`."""
    if not isinstance(value, int):
        raise RuleMisfit(f"its argument {value} is not a known integer")
    return int(value)


def numbers(value: Argument) -> tuple[int, ...]:
    """An argument that must be known integers, or a single one."""
    return tuple(number(item) for item in value) if isinstance(value, tuple) else (number(value),)
