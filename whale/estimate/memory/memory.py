"""Memory: parameters with gradient and optimizer state, activations kept for backward, and what an op works on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from whale.estimate.costs.line import Line
from whale.ir.graph import DTYPE_BYTES, ModelGraph, Parameter
from whale.ir.plan import Form, ParameterState


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a parameter on each device that holds it: what ops read, its gradient, and what the optimizer keeps beside these.

    ``on_host`` is what the optimizer keeps in the memory of the host.
    """

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
        training: whether it has a gradient and optimizer state where it is trained.
        kept: elements of it that the device keeps of what is shared out among owners; None for all that it holds.
    """

    def num_elements(form: Form) -> int:
        return parameter.spec.num_elements if form.sharding == "stage" or kept is None else kept

    def num_bytes(form: Form) -> int:
        return num_elements(form) * DTYPE_BYTES[form.dtype]

    if not training or state.gradient is None:
        return StateBytes(num_bytes(state.compute), 0, 0)
    stepped, is_there = optimizer_bytes(state, num_elements(state.kept)), state.kept.home == "host"
    return StateBytes(num_bytes(state.compute), num_bytes(state.gradient), 0 if is_there else stepped, stepped if is_there else 0)


def optimizer_bytes(state: ParameterState, num_elements: int) -> int:
    """Bytes of what the optimizer keeps of so many elements, in whichever memory, beside what ops read."""
    return (state.num_optimizer_tensors + state.is_copied) * num_elements * DTYPE_BYTES[state.kept.dtype]


def kept_names(
    graph: ModelGraph, ops: Iterable[str], kept: Mapping[str, tuple[str, ...]], segments: Iterable[Collection[str]]
) -> tuple[dict[str, None], tuple[frozenset[str], ...]]:
    """The tensors that a stage keeps for one micro-batch where runs of its ops are recomputed, and those that recomputing each brings back.

    A segment leaves the tensors that it reads from outside. In the backward pass all that its ops keep is there again,
    of one segment at a time.

    Args:
        kept: `whale.estimate.memory.kept.kept_tensors` of the graph. A tensor received from another stage counts too: this stage holds
            its own copy.
        segments: the runs, which do not overlap.
    """
    runs = [frozenset(segment) for segment in segments]
    again = frozenset().union(*runs)
    left = dict.fromkeys(name for op in ops if op not in again for name in kept.get(op, ()))
    for run in runs:
        read = (graph.storage[source] for op in run for source in graph.by_name[op].inputs if source not in run)
        left |= dict.fromkeys(name for name in read if graph.by_name[name].kind == "call")
    return left, tuple(frozenset(name for op in run for name in kept.get(op, ())).difference(left) for run in runs)


def largest_line(sizes: Mapping[str, Line], groups: Iterable[Iterable[str]]) -> Line:
    """Bytes of the largest of some groups of tensors, by rows."""
    return Line.largest(size_line(sizes, names) for names in groups)


def size_line(sizes: Mapping[str, Line], names: Iterable[str]) -> Line:
    """Bytes of tensors, each by the op that makes it, by rows."""
    return Line.sum(sizes[name] for name in names)


def saved_lines(
    graph: ModelGraph,
    sizes: Mapping[str, Line],
    ops: Iterable[str],
    kept: Mapping[str, tuple[str, ...]],
    segments: Iterable[Collection[str]],
) -> tuple[Line, ...]:
    """Bytes that a stage keeps less for one micro-batch, by each segment if it alone is recomputed.

    What only its own ops keep goes; what it reads from outside and nobody else keeps comes.

    Args:
        sizes: per op of the graph, the bytes of its outputs.
        kept: as in `kept_names`.
        segments: runs of the ops.
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


def working_line(sizes: Mapping[str, Line], ops: Iterable[str]) -> Line:
    """Bytes of the largest op's output, twice: the value and its gradient exist beside what is kept."""
    return Line.largest(sizes[name] for name in ops) * 2
