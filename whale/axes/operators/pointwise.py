"""Pointwise ops: dimension by dimension from the right, broadcasting, all operands unified.

x[ b s d ]
y[   1 d ]   ->  [ b s d ]     the result's d is the d of both
"""

from __future__ import annotations

from dataclasses import replace

from whale.axes.atoms import Clash, Dim
from whale.axes.operators.entry import Family, Moves, Operator, operand
from whale.axes.outcome import CLASHES, KEPT, Dims, Letter, Misfit, Outcome, Reading, sizes_of
from whale.ir.graph import Op


def pointwise(op: Op, reading: Reading) -> Outcome:
    """Unifies all operands with the results."""
    tensors = reading.tensors(op)
    letters: list[Letter] = []
    sizes = [sizes_of(spec) for spec in op.outputs]
    made = {shape: _result(shape, tensors, reading, letters) for shape in dict.fromkeys(sizes)}  # results of one shape are cut alike
    results = tuple(made[shape] for shape in sizes)
    adds_nothing = op.operator in ("add", "sub") and op.args[1:] == (0,)
    return Outcome(results, (*reading.rows_read(op), *letters), is_position=adds_nothing and reading.is_position(op.args[0]))


def copied(op: Op, reading: Reading) -> Outcome:
    """Unifies the operand with the result, whose values are the same: positions stay known."""
    made = pointwise(op, reading)
    return replace(made, is_position=bool(op.args) and reading.is_position(op.args[0]))


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


def prelu(op: Op, reading: Reading) -> str:
    """``prelu``: pointwise, with one weight per channel (dimension 1) or one for all."""
    if len(operand(op, reading)) < 2:
        return "input[...] weight[1] -> [...]"
    return "input[n channels ...] weight[channels] -> [n channels ...]"


POINTWISE: Family = {
    "prelu": Operator(prelu),
    "feature_dropout": Operator("input[n channels ...!] -> [n channels ...!]"),
    "view_as_complex": Operator("self[... _two!] -> [...]"),
    "view_as_real": Operator("self[...] -> [... _two!]"),
    "clone contiguous": Moves(copied, gradient="handed on"),
    "_to_copy alias detach lift_fresh lift_fresh_copy to type_as": Moves(copied),
    "add sub subtract": Moves(pointwise, gradient="handed on"),
    "rsub neg negative masked_fill": Moves(pointwise),
    "mul multiply div divide": Operator(pointwise, keeps="factors"),
    "tanh sigmoid exp sqrt rsqrt relu hardtanh dropout native_dropout": Operator(pointwise, keeps="result"),
    (
        "broadcast_tensors copy fill zero alpha_dropout bernoulli where lerp nan_to_num softplus rrelu_with_noise relu6 selu celu normal "
        "uniform bitwise_not _conj resolve_conj resolve_neg requires_grad __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ "
        "__ixor__ floor_divide absolute fix greater greater_equal less less_equal not_equal isclose arctan arctan2 hardswish log_sigmoid "
        "conj real imag polar complex fake_quantize_per_tensor_affine"
    ): Operator(pointwise),
}
