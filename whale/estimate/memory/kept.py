"""Which tensors the backward pass keeps: per op its inputs, its output, or nothing, and views by what they view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from whale.axes.operators import operator_of
from whale.estimate.costs.line import Line
from whale.ir.graph import DTYPE_BYTES, ModelGraph, Op, Ref
from whale.ir.writes import dependents


def activations_of(graph: ModelGraph) -> frozenset[str]:
    """The ops whose values depend on the batch."""
    return dependents(graph, (op.name for op in graph.ops if op.kind == "input" and op.outputs))


def kept_tensors(graph: ModelGraph) -> Mapping[str, tuple[str, ...]]:
    """Per op through which a gradient flows, the tensors (by owner of their storage) that it keeps for backward.

    Batch inputs, parameters and constants are in memory anyway and not among them.
    """
    if graph.mode != "train":
        return {}
    owner, by_name = graph.storage, graph.by_name
    result: dict[str, tuple[str, ...]] = {}
    for op in graph.ops:
        if op.kind != "call" or not op.requires_grad or "view" in op.tags or op.target == "operator.getitem":
            continue
        names = [owner[name] for name in _kept_by(op)]
        result[op.name] = tuple(dict.fromkeys(name for name in names if by_name[name].kind == "call" and by_name[name].outputs))
    return result


def keeps_parameter(graph: ModelGraph, op: Op, parameter: str) -> bool:
    """Whether an op keeps a parameter for backward: a product does where a gradient flows on to another of its operands.

    Args:
        parameter: the op that brings it.
    """
    if graph.mode != "train" or not op.requires_grad or parameter not in _kept_by(op):
        return False
    flows_on = any(graph.by_name[name].requires_grad for name in op.inputs if name != parameter and graph.by_name[name].kind == "call")
    return flows_on or operator_of(op).weights is None


def _kept_by(op: Op) -> tuple[str, ...]:
    keeps = operator_of(op).keeps
    if keeps == "nothing" or (keeps == "factors" and sum(isinstance(each, Ref) for each in op.args) == 1):
        return ()
    return (op.name,) if keeps == "result" else (*op.inputs, op.name) if keeps == "inputs and result" else op.inputs


def place_share(op: Op) -> float:
    """Bytes of the places that an op keeps, beside those of its result."""
    keeps = operator_of(op).keeps == "inputs and places" and op.requires_grad
    return DTYPE_BYTES["int64"] / DTYPE_BYTES[op.outputs[0].dtype] if keeps else 0.0


def places_line(graph: ModelGraph, sizes: Mapping[str, Line], ops: Iterable[str]) -> Line:
    """Bytes, by rows, of the places that some ops keep."""
    shares = ((name, place_share(graph.by_name[name])) for name in ops)
    return Line.sum(sizes[name] * share for name, share in shares if share)


def weight_share(graph: ModelGraph, name: str) -> float:
    """The share of an op's backward pass that is its weight gradients, where these can be computed apart: half, or all of it."""
    op = graph.by_name[name]
    if operator_of(op).weights is None or not op.requires_grad:
        return 0.0
    sources = [graph.by_name[source] for source in op.inputs]
    if not any(source.kind == "parameter" and source.requires_grad for source in sources):
        return 0.0
    return 0.5 if any(source.requires_grad and source.kind != "parameter" for source in sources) else 1.0


def kept_for_weights(graph: ModelGraph, ops: Iterable[str]) -> dict[str, None]:
    """What weight gradients that are computed apart wait with: what the ops read, and gradients as large as their results."""
    found: dict[str, None] = {}
    for name in ops:
        if weight_share(graph, name):
            found[name] = None
            found |= dict.fromkeys(graph.storage[source] for source in graph.by_name[name].inputs if graph.by_name[source].kind == "call")
    return found
