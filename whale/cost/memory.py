"""Memory: parameters with gradient and optimizer state, activations kept for backward, and what an op works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from whale.cost.line import Line
from whale.cost.op_table import output_line
from whale.ir.graph import ModelGraph, Parameter


def parameter_bytes(parameter: Parameter, optimizer_states: int, *, training: bool = True) -> int:
    """Bytes for a parameter or buffer on each device that holds it.

    Args:
        optimizer_states: tensors of its size that the optimizer keeps (Adam 2); a trainable parameter also has
            a gradient.
    """
    trains = training and parameter.kind == "parameter" and parameter.trainable
    return parameter.spec.num_bytes * (2 + optimizer_states if trains else 1)


def activation_line(graph: ModelGraph, ops: Iterable[str], kept: Mapping[str, tuple[str, ...]]) -> Line:
    """Bytes that a stage of these ops keeps for the backward pass of one micro-batch, by its rows.

    Args:
        kept: `whale.cost.kept.kept_tensors` of the graph. A tensor received from another stage counts here too:
            this stage holds its own copy.
    """
    names = dict.fromkeys(name for op in ops for name in kept.get(op, ()))
    return Line.sum(output_line(graph.by_name[name], graph.num_rows) for name in names)


def working_line(graph: ModelGraph, ops: Iterable[str]) -> Line:
    """Bytes of the largest op's output, twice: the value and its gradient exist beside what is kept."""
    fixed = per_row = 0.0
    for name in ops:
        line = output_line(graph.by_name[name], graph.num_rows)
        fixed, per_row = max(fixed, line.fixed), max(per_row, line.per_row)
    return Line(2 * fixed, 2 * per_row)
