"""The rule of pointwise ops: dimension by dimension from the right, broadcasting, all operands unified.

x[ b s d ]
y[   1 d ]   ->  [ b s d ]     the result's d is the d of both
"""

from __future__ import annotations

from whale.axes.atoms import Clash, Dim
from whale.axes.outcome import CLASHES, KEPT, Dims, Letter, Misfit, Outcome, Reading, sizes_of
from whale.axes.rules.templates import operand
from whale.ir.graph import Op


def pointwise(op: Op, reading: Reading) -> Outcome:
    """Unifies all operands with the results."""
    tensors = reading.tensors(op)
    letters: list[Letter] = []
    sizes = [sizes_of(spec) for spec in op.outputs]
    made = {shape: _result(shape, tensors, reading, letters) for shape in dict.fromkeys(sizes)}  # results of one shape are cut alike
    results = tuple(made[shape] for shape in sizes)
    return Outcome(results, (*reading.rows_read(op), *letters), is_position=_moves_nothing(op, reading))


def _result(sizes: tuple[int, ...], tensors: list[Dims], reading: Reading, letters: list[Letter]) -> Dims:
    atoms = reading.atoms
    made: list[Dim] = []
    for from_right, size in enumerate(reversed(sizes), start=1):
        met = [dims[-from_right] for dims in tensors if from_right <= len(dims) and dims[-from_right]]
        dim = met[0] if met else atoms.fresh(size)
        if atoms.size(dim) != size:
            raise Misfit(f"it makes a dimension of {size} from one of {atoms.size(dim)}")
        role = KEPT
        for other in met[1:]:
            if atoms.size(other) != size:
                raise Misfit("its operands have other sizes than its result")
            try:
                atoms.unify(dim, other)
            except Clash:
                role = CLASHES
                letters.append(Letter(f"dimension -{from_right}", CLASHES, other))
        letters.append(Letter(f"dimension -{from_right}", role, dim))
        made.append(dim)
    return tuple(reversed(made))


def _moves_nothing(op: Op, reading: Reading) -> bool:
    """Whether the values are its operand's: a copy, or 0 added. Keeps positions known."""
    first, *rest = op.args or (None,)
    if not reading.is_position(first):
        return False
    name = op.target.split(".")[1]
    return name in COPIES or (name in ("add", "sub", "add_") and rest == [0])


COPIES = frozenset({"to", "_to_copy", "clone", "contiguous", "detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy", "type_as"})
"""Ops that change no value but perhaps its type."""


def prelu(op: Op, reading: Reading) -> str:
    """``prelu``: pointwise, with one weight per channel (dimension 1) or one for all."""
    if len(operand(op, reading)) < 2:
        return "input[...] weight[1] -> [...]"
    return "input[n channels ...] weight[channels] -> [n channels ...]"
