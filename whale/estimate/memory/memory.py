"""Memory of parameters with gradient and optimizer state, activations kept for backward, and an op's working set.

The backward pass of an op keeps its inputs, its output, or nothing; of a view, the base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from whale.axes.operators import operator_of
from whale.estimate.costs.line import Line
from whale.ir.graph import DTYPE_BYTES, ModelGraph, Op, Parameter, Ref
from whale.ir.plan import Form, ParameterState
from whale.ir.writes import dependents


def activations_of(graph: ModelGraph) -> frozenset[str]:
    """The ops whose values depend on the batch."""
    return dependents(graph, (op.name for op in graph.ops if op.kind == "input" and op.outputs))


def kept_tensors(graph: ModelGraph) -> Mapping[str, tuple[str, ...]]:
    """Per op with a gradient, the tensors (by owner of their storage) that it keeps for backward.

    Batch inputs, parameters and constants stay in memory anyway and are left out.
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


def keeps_read(graph: ModelGraph, kept: Mapping[str, tuple[str, ...]], reader: str, tensor: str) -> bool:
    """Whether an op keeps for backward a tensor that it reads, given by the op that makes or brings it.

    Of parameters a product keeps those besides which a gradient flows to another of its operands. `kept`: `kept_tensors` of the graph.
    """
    if graph.by_name[tensor].kind == "call":
        return graph.storage[tensor] in kept.get(reader, ())
    op = graph.by_name[reader]
    if graph.mode != "train" or not op.requires_grad or tensor not in _kept_by(op):
        return False
    flows_on = any(graph.by_name[name].requires_grad for name in op.inputs if name != tensor and graph.by_name[name].kind == "call")
    return flows_on or operator_of(op).weights is None


def _kept_by(op: Op) -> tuple[str, ...]:
    keeps = operator_of(op).keeps
    if keeps == "nothing" or (keeps == "factors" and sum(isinstance(each, Ref) for each in op.args) == 1):
        return ()
    return (op.name,) if keeps == "result" else (*op.inputs, op.name) if keeps == "inputs and result" else op.inputs


def place_share(op: Op) -> float:
    """Bytes of the indices that an op keeps (max pooling), relative to those of its result."""
    keeps = operator_of(op).keeps == "inputs and places" and op.requires_grad
    return DTYPE_BYTES["int64"] / DTYPE_BYTES[op.outputs[0].dtype] if keeps else 0.0


def places_line(graph: ModelGraph, sizes: Mapping[str, Line], ops: Iterable[str]) -> Line:
    """Bytes, by rows, of the indices that some ops keep."""
    shares = ((name, place_share(graph.by_name[name])) for name in ops)
    return Line.sum(sizes[name] * share for name, share in shares if share)


def weight_share(graph: ModelGraph, name: str) -> float:
    """The share of an op's backward pass that is deferrable weight gradients: half, or all of it."""
    op = graph.by_name[name]
    if operator_of(op).weights is None or not op.requires_grad:
        return 0.0
    sources = [graph.by_name[source] for source in op.inputs]
    if not any(source.kind == "parameter" and source.requires_grad for source in sources):
        return 0.0
    return 0.5 if any(source.requires_grad and source.kind != "parameter" for source in sources) else 1.0


def kept_for_weights(graph: ModelGraph, ops: Iterable[str]) -> dict[str, None]:
    """What deferred weight gradients keep: what the ops read, and gradients as large as their results."""
    found: dict[str, None] = {}
    for name in ops:
        if weight_share(graph, name):
            found[name] = None
            found |= dict.fromkeys(graph.storage[source] for source in graph.by_name[name].inputs if graph.by_name[source].kind == "call")
    return found


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a parameter on each device that holds it: what ops read, its gradient, and further optimizer state; and on the host."""

    compute: int
    gradient: int
    optimizer: int
    on_host: int = 0

    @property
    def total(self) -> int:
        return self.compute + self.gradient + self.optimizer


def state_bytes(parameter: Parameter, state: ParameterState, *, training: bool = True, kept: int | None = None) -> StateBytes:
    """Bytes of a parameter or buffer on a device that holds it.

    Args:
        state: its forms.
        training: whether trained parameters have gradient and optimizer state.
        kept: elements that the device keeps of what is sharded over owners; None for all that it holds.
    """

    def num_elements(form: Form) -> int:
        return parameter.spec.num_elements if form.sharding == "stage" or kept is None else kept

    def num_bytes(form: Form) -> int:
        return num_elements(form) * DTYPE_BYTES[form.dtype]

    read, is_read_there = num_bytes(state.compute), state.compute.home == "host"
    at_home = 0 if is_read_there else read, read if is_read_there else 0
    if not training or state.gradient is None:
        return StateBytes(at_home[0], 0, 0, at_home[1])
    stepped, is_there = optimizer_bytes(state, num_elements(state.kept)), state.kept.home == "host"
    on_host = at_home[1] + (stepped if is_there else 0)
    made = parameter.gradient_elements * DTYPE_BYTES[state.gradient.dtype] if state.gradient.is_sparse else num_bytes(state.gradient)
    return StateBytes(at_home[0], made, 0 if is_there else stepped, on_host)


def optimizer_bytes(state: ParameterState, num_elements: int) -> int:
    """Bytes of optimizer state of so many elements, in any memory, besides what ops read."""
    return (state.num_optimizer_tensors + state.num_outer_tensors + state.is_copied) * num_elements * DTYPE_BYTES[state.kept.dtype]


def kept_names(
    graph: ModelGraph, ops: Iterable[str], kept: Mapping[str, tuple[str, ...]], segments: Iterable[Collection[str]]
) -> tuple[dict[str, None], tuple[frozenset[str], ...]]:
    """The tensors that a stage with recomputed segments keeps for one micro-batch, and those that recomputing each segment restores.

    A segment keeps the tensors that it reads from outside. In the backward pass all that its ops keep is restored, one
    segment at a time.

    Args:
        kept: `kept_tensors` of the graph. A tensor received from another stage counts: this stage holds its own copy.
        segments: the runs, which do not overlap.
    """
    runs = [frozenset(segment) for segment in segments]
    repeated = frozenset().union(*runs)
    left = dict.fromkeys(name for op in ops if op not in repeated for name in kept.get(op, ()))
    for run in runs:
        read = (graph.storage[source] for op in run for source in graph.by_name[op].inputs if source not in run)
        left |= dict.fromkeys(name for name in read if graph.by_name[name].kind == "call")
    return left, tuple(frozenset(name for op in run for name in kept.get(op, ())).difference(left) for run in runs)


def size_line(sizes: Mapping[str, Line], names: Iterable[str]) -> Line:
    """Bytes of tensors, each given by the op that makes it, by rows."""
    return Line.sum(sizes[name] for name in names)


def saved_lines(
    graph: ModelGraph,
    sizes: Mapping[str, Line],
    ops: Iterable[str],
    kept: Mapping[str, tuple[str, ...]],
    segments: Iterable[Collection[str]],
) -> tuple[Line, ...]:
    """Per segment, the bytes that a stage keeps less for one micro-batch if only this segment is recomputed.

    What only its own ops keep goes; what it reads from outside and nobody else keeps is added.
    """
    keepers = Counter(name for op in ops for name in kept.get(op, ()))
    found = []
    for segment in segments:
        run = frozenset(segment)
        inside = Counter(name for op in segment for name in kept.get(op, ()))
        outside = (graph.storage[source] for op in segment for source in graph.by_name[op].inputs if source not in run)
        read = dict.fromkeys(name for name in outside if graph.by_name[name].kind == "call")
        gone = size_line(sizes, (name for name, count in inside.items() if count == keepers[name] and name not in read))
        come = size_line(sizes, (name for name in read if name not in keepers))
        found.append(gone + come * -1)
    return tuple(found)
