"""Pointwise ops and factories.

Pointwise ops go dimension by dimension from the right, broadcasting, all operands unified:

x[ b s d ]
y[   1 d ]   ->  [ b s d ]     the result's d is the d of both

Factories make a tensor from sizes, so that any part can be made alone. Values that depend on positions (``arange``, ``linspace``, ``eye``)
are marked: a piece of the batch alone would count its rows from the start. A part of ``arange`` keeps its positions in the whole, and an
index by all positions of a dimension is that dimension itself.
"""

from __future__ import annotations

from dataclasses import replace

from whale.axes.atoms import ROWS, Clash, Dim
from whale.axes.operators.entry import Family, Moves, Operator, operand
from whale.axes.outcome import BROADCAST, CLASHES, KEPT, NUMBERS, Dims, Letter, Reading, RuleMisfit, RuleOutcome, argument
from whale.axes.values import Role
from whale.ir.graph import Op


def pointwise(op: Op, reading: Reading) -> RuleOutcome:
    tensors = reading.tensors(op)
    letters: list[Letter] = []
    sizes = [spec.shape_at(ROWS) for spec in op.outputs]
    made = {shape: _result(shape, tensors, reading, letters) for shape in dict.fromkeys(sizes)}  # equal shapes are cut equally
    results = tuple(made[shape] for shape in sizes)
    adds_nothing = op.operator in ("add", "sub") and op.args[1:] == (0,)
    return RuleOutcome(results, (*reading.rows_read(op), *letters), is_position=adds_nothing and reading.is_position(op.args[0]))


def copied(op: Op, reading: Reading) -> RuleOutcome:
    """Pointwise with equal values: positions stay known."""
    made = pointwise(op, reading)
    return replace(made, is_position=reading.is_position(op.args[0]), places=reading.places(op.args[0])) if op.args else made


def _result(sizes: tuple[int, ...], tensors: list[Dims], reading: Reading, letters: list[Letter]) -> Dims:
    atoms = reading.atoms
    made: list[Dim] = []
    for from_right, size in enumerate(reversed(sizes), start=1):
        met = [dims[-from_right] for dims in tensors if from_right <= len(dims) and dims[-from_right]]
        dim = met[0] if met else atoms.fresh(size)
        if atoms.size(dim) != size:
            raise RuleMisfit(f"it makes a dimension of {size} from one of {atoms.size(dim)}")
        role = KEPT
        for other in met[1:]:
            if atoms.size(other) != size:
                raise RuleMisfit("its operands have other sizes than its result")
            try:
                atoms.unify(dim, other)
            except Clash:
                role = CLASHES
                letters.append(Letter(f"dimension -{from_right}", CLASHES, other))
        letters.append(Letter(f"dimension -{from_right}", role, dim))
        made.append(dim)
    return tuple(reversed(made))


def prelu(op: Op, reading: Reading) -> str:
    """Pointwise, with one weight per channel (dimension 1) or one for all."""
    if len(operand(op, reading)) < 2:
        return "input[...] weight[1] -> [...]"
    return "input[n channels ...] weight[channels] -> [n channels ...]"


POINTWISE: Family = {
    "prelu": Operator(prelu),
    "feature_dropout": Operator("input[n channels ...!] -> [n channels ...!]"),
    "view_as_complex": Operator("self[... _two!] -> [...]"),
    "view_as_real": Operator("self[...] -> [... _two!]"),
    "clone contiguous": Moves(copied, gradient="handed on", rows="same"),
    "alias detach lift_fresh lift_fresh_copy": Moves(copied, rows="same"),
    "_to_copy to type_as": Moves(copied, rows="moved"),
    "add": Moves(pointwise, gradient="handed on", rows="added"),
    "sub subtract": Moves(pointwise, gradient="handed on", rows="subtracted"),
    "rsub": Moves(pointwise, rows="subtracted from"),
    "neg negative": Moves(pointwise, rows="negated"),
    "masked_fill": Moves(pointwise),
    "mul multiply": Operator(pointwise, keeps="factors", rows="multiplied"),
    "div divide true_divide": Operator(pointwise, keeps="factors", rows="divided"),
    "copy": Operator(pointwise, rows="copied"),
    "fill.Scalar": Operator(pointwise, rows="filled"),
    "zero": Operator(pointwise, rows="zeros"),
    "lerp": Operator(pointwise, rows="interpolated"),
    "gt ge greater greater_equal": Operator(pointwise, rows="rising"),
    "lt le less less_equal logical_not bitwise_not": Operator(pointwise, rows="falling"),
    "clamp clamp_min": Operator(pointwise, rows="bounded"),
    "tanh sigmoid exp sqrt rsqrt relu hardtanh native_dropout": Operator(pointwise, keeps="result"),
    "dropout": Operator(pointwise, keeps="result", by_place=True),
    (
        "broadcast_tensors fill alpha_dropout bernoulli where nan_to_num softplus rrelu_with_noise relu6 selu celu normal uniform _conj "
        "resolve_conj resolve_neg requires_grad __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ floor_divide "
        "absolute fix not_equal isclose arctan arctan2 hardswish log_sigmoid conj real imag polar complex fake_quantize_per_tensor_affine"
    ): Operator(pointwise),
}


def factory(op: Op, reading: Reading) -> RuleOutcome:
    return _made(op, reading, BROADCAST)


def numbering(op: Op, reading: Reading) -> RuleOutcome:
    """``linspace``, ``eye``: a factory of values that depend on their positions."""
    return _made(op, reading, NUMBERS)


def _made(op: Op, reading: Reading, role: Role) -> RuleOutcome:
    results = tuple(reading.fresh(spec) for spec in op.outputs)
    letters = [Letter(f"dimension {index}", role, dim) for dims in results for index, dim in enumerate(dims) if dim]
    return RuleOutcome(results, tuple(letters))


def constant(op: Op, reading: Reading) -> RuleOutcome:
    """``full``, ``new_full``, ``scalar_tensor``: a factory of one value, which may be the number of rows."""
    made = factory(op, reading)
    place = {"full": 1, "new_full": 2}.get(op.target.split(".")[1], 0)
    return RuleOutcome(made.results, (*reading.rows_read(op, place), *made.letters))


def positions(op: Op, reading: Reading) -> RuleOutcome:
    """``arange``: a factory of positions, if it counts from 0 by 1."""
    made = numbering(op, reading)
    overload = op.target.rsplit(".", 1)[-1]
    start = 0 if overload == "default" else argument(op, 0, "start", 0)
    step = argument(op, 2, "step", 1) if overload == "start_step" else 1
    return RuleOutcome(made.results, made.letters, is_position=(start, step) == (0, 1))


FACTORIES: Family = {
    "arange": Operator(positions, "shapes.made_whole"),
    "linspace eye": Operator(numbering, "shapes.made_whole"),
    "zeros new_zeros": Operator(factory, "shapes.sized", rows="zeros"),
    "ones empty new_ones new_empty": Operator(factory, "shapes.sized", rows="shaped"),
    "rand randn randint": Operator(factory, "shapes.made_whole"),
    "new_empty_strided": Operator(on_parts=None, rows="shaped"),
    "full new_full": Operator(constant, "shapes.sized", rows="filled"),
    "scalar_tensor": Operator(constant, rows="filled"),
    "randperm": Operator("-> [n!]"),
    "tril_indices triu_indices": Operator("-> [_two! _places!]"),
    "zeros_like": Operator(pointwise, rows="zeros"),
    "ones_like empty_like rand_like randn_like randint_like": Operator(pointwise, rows="shaped"),
    "full_like": Operator(pointwise, rows="filled"),
}
