"""Four checks that make wrong cuts impossible, over the letters of one op once all atoms are known.

1. One axis met twice (``x @ x.T``, ``u[:, None] - u``): a cut would keep only the diagonal blocks.
2. Contracted and kept: the axis is two letters that never meet in one tensor (a square layer with a residual).
3. Axes that vanish or appear without saying so. The notation sees to it: such letters are whole.
4. An axis in only some pieces of a concatenated dimension: the whole pieces' gradient would be summed twice.

Where a check fails the axis is whole at this op, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from whale.axes.atoms import Atoms, Dim
from whale.axes.outcome import Letter
from whale.axes.values import Role

SOME_PIECES = Role("whole", reason="has it in only some pieces of a concatenated dimension")
TWICE = Role("whole", reason="meets it twice")
CONTRACTED_AND_KEPT = Role("whole", reason="meets it twice, contracted and kept")


class Checker:
    """Judges op after op. The atoms must not change any more."""

    def __init__(self, atoms: Atoms) -> None:
        self._atoms = atoms
        self._met: dict[Dim, tuple[tuple[int, bool], ...]] = {}

    def roles(self, letters: Iterable[Letter]) -> dict[int, Role]:
        """What an op does with each axis, by leaf, after the checks."""
        roles: dict[int, Role] = {}
        for letter in letters:
            for leaf, everywhere in self.met(letter.dim):
                role = letter.role if everywhere or letter.role.kind == "whole" else SOME_PIECES
                known = roles.get(leaf)
                if known is None or (role.kind == "whole" and known.kind != "whole"):
                    roles[leaf] = role
                elif known.kind != "whole":
                    roles[leaf] = CONTRACTED_AND_KEPT if {known.kind, role.kind} == {"contracted", "kept"} else TWICE
        return roles

    def met(self, dim: Dim) -> tuple[tuple[int, bool], ...]:
        """The axes in a dimension, each with whether all pieces of a concatenation have it; one may come twice."""
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
