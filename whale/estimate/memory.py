"""Memory: parameters with gradient and optimizer state, activations kept for backward, and what an op works on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from whale.estimate.line import Line
from whale.estimate.op_table import output_line
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
        kept: `whale.estimate.kept.kept_tensors` of the graph. A tensor received from another stage counts here too:
            this stage holds its own copy.
    """
    names = dict.fromkeys(name for op in ops for name in kept.get(op, ()))
    return Line.sum(output_line(graph.by_name[name], graph.num_rows) for name in names)


def recomputed_lines(
    graph: ModelGraph,
    ops: Iterable[str],
    kept: Mapping[str, tuple[str, ...]],
    segments: Iterable[Collection[str]],
) -> tuple[Line, Line]:
    """Bytes that a stage keeps for one micro-batch where runs of its ops are recomputed, and what recomputing one adds.

    A segment leaves the tensors that it reads from outside. In the backward pass all that its ops keep is there again,
    of one segment at a time.

    Args:
        kept: as in `activation_line`.
        segments: the runs, which do not overlap.
    """
    runs = [frozenset(segment) for segment in segments]
    again = frozenset().union(*runs)
    left = dict.fromkeys(name for op in ops if op not in again for name in kept.get(op, ()))
    for run in runs:
        read = (graph.storage[source] for op in run for source in graph.by_name[op].inputs if source not in run)
        left |= dict.fromkeys(name for name in read if graph.by_name[name].kind == "call")
    largest = Line()
    for run in runs:
        inside = {name for op in run for name in kept.get(op, ())}.difference(left)
        line = Line.sum(output_line(graph.by_name[name], graph.num_rows) for name in inside)
        largest = Line(max(largest.fixed, line.fixed), max(largest.per_row, line.per_row))
    return Line.sum(output_line(graph.by_name[name], graph.num_rows) for name in left), largest


def working_line(graph: ModelGraph, ops: Iterable[str]) -> Line:
    """Bytes of the largest op's output, twice: the value and its gradient exist beside what is kept."""
    fixed = per_row = 0.0
    for name in ops:
        line = output_line(graph.by_name[name], graph.num_rows)
        fixed, per_row = max(fixed, line.fixed), max(per_row, line.per_row)
    return Line(2 * fixed, 2 * per_row)
