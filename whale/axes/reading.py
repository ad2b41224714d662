"""Reads the graph once, op by op: each op's rule makes its dimensions from those of its operands."""

from __future__ import annotations

from whale.axes.atoms import ROWS, Atoms
from whale.axes.binding import bind
from whale.axes.notation import parse
from whale.axes.operators import operator_of
from whale.axes.operators.concatenations import find_tilings
from whale.axes.outcome import KEPT, Dims, Letter, Misfit, Outcome, Reading, sizes_of
from whale.axes.values import Role
from whale.ir.graph import ModelGraph, Op, Ref

NO_RULE = Role("whole", reason="has no rule")


def read(graph: ModelGraph) -> tuple[Reading, dict[str, Outcome]]:
    """Dimensions and letters of every op that makes tensors."""
    atoms = Atoms()
    reading = Reading(graph, atoms, atoms.fresh(ROWS), {}, set(), find_tilings(graph))
    parameters: dict[str, Dims] = {}
    outcomes: dict[str, Outcome] = {}
    for op in graph.ops:
        if not op.outputs:
            continue
        outcome = _read_call(op, reading) if op.kind == "call" else _read_source(op, reading, parameters)
        outcomes[op.name] = outcome
        reading.dims[op.name] = outcome.results
        if outcome.is_position:
            reading.positions.add(op.name)
    return reading, outcomes


def _read_source(op: Op, reading: Reading, parameters: dict[str, Dims]) -> Outcome:
    """An input, parameter, buffer or constant. Tied names are one parameter; dimension 0 of inputs is the batch."""
    spec = op.outputs[0]
    known = reading.graph.parameter_by_name.get(op.target) if op.kind in ("parameter", "buffer") else None
    dims = parameters.get(known.name) if known else None
    if dims is None:
        dims = reading.fresh(spec)
        if op.kind == "input" and sizes_of(spec)[:1] == (ROWS,):
            dims = (reading.batch, *dims[1:])
        if known:
            parameters[known.name] = dims
    return Outcome((dims,), tuple(Letter(f"dimension {index}", KEPT, dim) for index, dim in enumerate(dims)))


def _read_call(op: Op, reading: Reading) -> Outcome:
    if op.target == "operator.getitem":
        return _item(op, reading)
    rule = operator_of(op).axes
    if rule is None:
        return _unknown(op, NO_RULE, reading)
    try:
        made = rule if isinstance(rule, str) else rule(op, reading)
        return bind(parse(made), op, reading) if isinstance(made, str) else made
    except Misfit as misfit:
        return _unknown(op, Role("whole", reason=f"has a rule that does not fit here ({misfit})"), reading)


def _item(op: Op, reading: Reading) -> Outcome:
    """One result of an op that has several."""
    source, index = op.args
    if not isinstance(source, Ref) or not isinstance(index, int):
        return _unknown(op, NO_RULE, reading)
    results = reading.dims[source.op]
    dims = results[index]
    return Outcome((dims,), tuple(Letter(f"dimension {place}", KEPT, dim) for place, dim in enumerate(dims)))


def _unknown(op: Op, role: Role, reading: Reading) -> Outcome:
    """An op of which nothing is known: all its axes are whole, so no wrong cut can come of it.

    Rows stay rows: a result that has as many as the batch, from operands that have the batch, is taken to hold one
    per sample, in order. That the op may mix samples all the same is what `Axes.mixing` says.
    """
    operands = [dim for dims in reading.tensors(op) for dim in dims]
    batch = set(reading.atoms.leaves(reading.batch))
    has_batch = any(batch & set(reading.atoms.leaves(dim)) for dim in operands)
    results = tuple(_with_batch(reading.fresh(spec), reading) if has_batch else reading.fresh(spec) for spec in op.outputs)
    made = [dim for dims in results for dim in dims]
    return Outcome(results, tuple(Letter("?", role, dim) for dim in (*operands, *made) if dim))


def _with_batch(dims: Dims, reading: Reading) -> Dims:
    place = next((index for index, dim in enumerate(dims) if reading.atoms.size(dim) == ROWS), None)
    return dims if place is None else (*dims[:place], reading.batch, *dims[place + 1 :])
