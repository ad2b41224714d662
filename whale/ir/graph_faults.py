"""Whether a graph that was read from a file holds together: names, references, sizes and dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from whale.ir.graph import DTYPE_BYTES, MOST_ROWS, NUM_ROWS, ModelGraph, Op, TensorSpec


def faults_of(graph: ModelGraph) -> Iterator[str]:
    """What is wrong with a graph, in words; nothing for one that a capture has made."""
    if not 1 <= graph.num_rows <= MOST_ROWS:
        yield f"num_rows: {graph.num_rows} is not from 1 to {MOST_ROWS:,}"
    names = Counter(name for each in graph.parameters for name in (each.name, *each.ties))
    yield from (f"parameter {name} is there {count} times" for name, count in names.items() if count > 1)
    for parameter in graph.parameters:
        place = f"parameter {parameter.name}"
        yield from _faults_of_spec(place, parameter.spec)
        if parameter.read_as is not None and parameter.read_as not in DTYPE_BYTES:
            yield f"{place} is read as {parameter.read_as!r}, which is no dtype"
    known: set[str] = set()
    for op in graph.ops:
        if op.name in known:
            yield f"op {op.name} is there twice"
        yield from (f"op {op.name} reads %{name}, which is no op before it" for name in op.inputs if name not in known)
        yield from _faults_of_op(graph, op)
        known.add(op.name)
    ends = [*graph.outputs, *(name for term in graph.loss for name in (term.sum, term.weight) if name is not None)]
    yield from (f"the result is %{name}, which is no op" for name in ends if name not in known)


def _faults_of_op(graph: ModelGraph, op: Op) -> Iterator[str]:
    for spec in op.outputs:
        yield from _faults_of_spec(f"op {op.name}", spec)
    if op.kind == "call":
        return
    if len(op.outputs) != 1 and op.name != NUM_ROWS:
        yield f"op {op.name}, of kind {op.kind}, has {len(op.outputs)} outputs, not 1"
    if op.kind in ("parameter", "buffer"):
        found = graph.parameter_by_name.get(op.target)
        if found is None or found.kind != op.kind:
            yield f"op {op.name} is {op.kind} {op.target}, which the model has not"


def _faults_of_spec(place: str, spec: TensorSpec) -> Iterator[str]:
    if spec.dtype not in DTYPE_BYTES:
        yield f"{place}: {spec.dtype!r} is no dtype"
    if len(spec.shape) != len(spec.row_factors):
        yield f"{place} has {len(spec.shape)} sizes and {len(spec.row_factors)} row factors"
    if any(size < 0 for size in spec.shape):
        yield f"{place} has the shape {list(spec.shape)}"
