"""Factories: ops that make a tensor from sizes alone, so that any part of it can be made alone.

``arange`` is special: a part keeps its positions in the whole, and an index by all positions of a dimension is that
dimension itself. Which tensors hold positions is remembered. Values that differ from place to place (``arange``,
``linspace``, ``eye``) say so: a piece of the batch by itself would count its rows from the start again.
"""

from __future__ import annotations

from whale.axes.operators.entry import Family, Operator
from whale.axes.operators.pointwise import pointwise
from whale.axes.outcome import BROADCAST, NUMBERS, Letter, Outcome, Reading, argument
from whale.axes.values import Role
from whale.ir.graph import Op


def factory(op: Op, reading: Reading) -> Outcome:
    """New dimensions, made by the op."""
    return _made(op, reading, BROADCAST)


def numbering(op: Op, reading: Reading) -> Outcome:
    """``linspace``, ``eye``: a factory of values that depend on their places."""
    return _made(op, reading, NUMBERS)


def _made(op: Op, reading: Reading, role: Role) -> Outcome:
    results = tuple(reading.fresh(spec) for spec in op.outputs)
    letters = [Letter(f"dimension {index}", role, dim) for dims in results for index, dim in enumerate(dims) if dim]
    return Outcome(results, tuple(letters))


def constant(op: Op, reading: Reading) -> Outcome:
    """``full``, ``new_full``, ``scalar_tensor``: a factory of one value, which may be the number of rows."""
    made = factory(op, reading)
    place = {"full": 1, "new_full": 2}.get(op.target.split(".")[1], 0)
    return Outcome(made.results, (*reading.rows_read(op, place), *made.letters))


def positions(op: Op, reading: Reading) -> Outcome:
    """``arange``: a factory of positions, if it counts from 0 by 1."""
    made = numbering(op, reading)
    overload = op.target.rsplit(".", 1)[-1]
    start = 0 if overload == "default" else argument(op, 0, "start", 0)
    step = argument(op, 2, "step", 1) if overload == "start_step" else 1
    return Outcome(made.results, made.letters, is_position=(start, step) == (0, 1))


FACTORIES: Family = {
    "arange": Operator(positions, "shapes.made_whole"),
    "linspace eye": Operator(numbering, "shapes.made_whole"),
    "zeros ones empty new_zeros new_ones new_empty": Operator(factory, "shapes.sized"),
    "rand randn randint": Operator(factory, "shapes.made_whole"),
    "full new_full": Operator(constant, "shapes.sized"),
    "scalar_tensor": Operator(constant),
    "randperm": Operator("-> [n!]"),
    "tril_indices triu_indices": Operator("-> [_two! _places!]"),
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like": Operator(pointwise),
}
