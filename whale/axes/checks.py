"""Five checks that make wrong cuts impossible, over the letters of one op once all atoms are known.

1. One axis met twice (``x @ x.T``, ``u[:, None] - u``): a cut would keep only the diagonal blocks.
2. Contracted and kept: two letters of one op that never meet in one tensor are one axis (a square layer with a residual).
3. Axes that vanish or appear without a mark. The notation makes such letters whole.
4. An axis in only some pieces of a concatenated dimension: the whole pieces' gradient would be summed twice.
5. An axis of unknown size: it depends on values (``x[mask]``), or on the rows but not in proportion (``cat((x, rows_of_mine))``).

An axis that fails a check is whole at this op, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from whale.axes.atoms import ROWS, Atoms, Dim
from whale.axes.outcome import Letter, RuleOutcome
from whale.axes.values import Role
from whale.ir.graph import ModelGraph

SOME_PIECES = Role("whole", reason="has it in only some pieces of a concatenated dimension")
TWICE = Role("whole", reason="meets it twice")
CONTRACTED_AND_KEPT = Role("whole", reason="meets it twice, contracted and kept")
UNKNOWN_SIZE = Role("whole", reason="has it in a size that depends on values or rows")


class Checker:
    """Checks op after op; the atoms must not change any more, and the sizes of the leaves in `unknown` are not known."""

    def __init__(self, atoms: Atoms, unknown: Set[int] = frozenset()) -> None:
        self._atoms, self._unknown = atoms, unknown
        self._met: dict[Dim, tuple[tuple[int, bool], ...]] = {}

    def roles(self, letters: Iterable[Letter]) -> dict[int, Role]:
        """What an op does with each axis, by leaf, after the checks."""
        roles: dict[int, Role] = {}
        for letter in letters:
            for leaf, everywhere in self.met(letter.dim):
                role = letter.role if everywhere or letter.role.kind == "whole" else SOME_PIECES
                role = UNKNOWN_SIZE if leaf in self._unknown and role.kind != "whole" else role
                known = roles.get(leaf)
                if known is None or (role.kind == "whole" and known.kind != "whole"):
                    roles[leaf] = role
                elif known.kind != "whole":
                    roles[leaf] = CONTRACTED_AND_KEPT if {known.kind, role.kind} == {"contracted", "kept"} else TWICE
        return roles

    def met(self, dim: Dim) -> tuple[tuple[int, bool], ...]:
        """The axes in a dimension, each with whether all pieces of a concatenation have it; one may occur twice."""
        found = self._met.get(dim)
        if found is None:
            found = self._met[dim] = tuple(entry for leaf in self._atoms.leaves(dim) for entry in self._leaf(leaf))
        return found

    def _leaf(self, leaf: int) -> Iterable[tuple[int, bool]]:
        pieces = self._atoms.pieces(leaf)
        if not pieces:
            return [(leaf, True)]
        held = [self.met(piece) for piece in pieces]
        everywhere = set.intersection(*({axis for axis, complete in piece if complete} for piece in held))
        once = dict.fromkeys(axis for piece in held for axis, _ in piece)
        again = [axis for axis in once if any([a for a, _ in piece].count(axis) > 1 for piece in held)]
        return [(axis, axis in everywhere) for axis in (*once, *again)]


def leaves_of_unknown_size(graph: ModelGraph, outcomes: Mapping[str, RuleOutcome], atoms: Atoms) -> Set[int]:
    """Leaves that are dimensions of which only the example's size is known, and are in no others."""
    if all(factor >= 0 for op in graph.ops for spec in op.outputs for factor in spec.row_factors):
        return frozenset()
    found: set[int] = set()
    known: set[int] = set()
    for op in graph.ops:
        results = outcomes[op.name].results if op.outputs else ()
        for dims, spec in zip(results, op.outputs, strict=True):
            for dim, factor in zip(dims, spec.row_factors, strict=True):
                leaves = atoms.leaves(dim)
                if factor >= 0:
                    known |= {axis for leaf in leaves for axis in (leaf, *_inside(leaf, atoms))}
                elif len(leaves) == 1 and not atoms.pieces(leaves[0]) and atoms.size(leaves) % ROWS:
                    found.add(leaves[0])
    return found - known


def _inside(leaf: int, atoms: Atoms) -> Iterable[int]:
    return (inner for piece in atoms.pieces(leaf) for inner in atoms.leaves(piece))
