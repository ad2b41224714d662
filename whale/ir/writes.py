"""What an op really reads: the memory of each value, and earlier writes to it.

    out = zeros_like(x)       its own memory
    v = out[:, 0]             shares out's memory
    v.copy_(s)                writes out's memory
    y = f(out)                reads out, and the write through v before it
    d = out.detach()          shares out's memory too, but no gradient passes between them

Walks from results to sources, or back, use `Reads`: the arguments of an op alone do not say what it depends on. Also: which parameters the
loss depends on, and so have a gradient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from whale.ir.graph import ModelGraph, Op

# ops that update running statistics in training, without marking it in their schema
SILENT_WRITERS = frozenset({"batch_norm", "instance_norm"})

TRAINING = 5  # position of the argument that makes them do so


class TorchCall(Protocol):
    """A call of a torch op in a graph."""

    @property
    def target(self) -> Any: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...


C = TypeVar("C", bound=TorchCall)


def marked_arguments(call: C, *, writes: bool) -> list[C]:
    """The arguments, calls themselves, that an op's schema says its results may alias; or that it writes."""
    schema, found = getattr(call.target, "_schema", None), list[C]()
    for position, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is None or (writes and not argument.alias_info.is_write):
            continue
        value = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
        found += [item for item in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(item, type(call))]
    return found


def written_storages(graph: ModelGraph, op: Op) -> tuple[str, ...]:
    if op.operator in SILENT_WRITERS:
        if len(op.args) > TRAINING and op.args[TRAINING] is False:
            return ()
        return tuple(graph.storage[name] for name in op.inputs if graph.by_name[graph.storage[name]].kind == "buffer")
    return (graph.storage[op.name],) if "in_place" in op.tags else ()


def written_buffers(graph: ModelGraph, among: Collection[str] | None = None) -> Mapping[str, tuple[Op, ...]]:
    """Per buffer that some op (of those `among`) writes, by its own name, those ops in order."""
    found: dict[str, list[Op]] = {}
    for op in graph.ops:
        for storage in written_storages(graph, op) if among is None or op.name in among else ():
            if graph.by_name[storage].kind == "buffer":
                found.setdefault(graph.parameter_by_name[graph.by_name[storage].target].name, []).append(op)
    return {name: tuple(ops) for name, ops in found.items()}


class Reads:
    """What the ops of a graph read: their arguments, and the last write to each since it was made, which reads the writes before it.

    If `differentiable`, only paths of gradients count: a write to a detached value changes what others read, not their gradients.
    """

    def __init__(self, graph: ModelGraph, *, differentiable: bool = False) -> None:
        self._graph, self._differentiable = graph, differentiable

    def of(self, op: str) -> tuple[str, ...]:
        """What an op reads, each once."""
        found = dict.fromkeys(self._graph.by_name[op].inputs)
        for name in tuple(found):
            found |= dict.fromkeys(self._writes_since(name, self._graph.position[op]))
        return tuple(found)

    def at_end(self, value: str) -> tuple[str, ...]:
        """What a reader of a value reads after all ops have run."""
        return (value, *self._writes_since(value, len(self._graph.ops)))

    def ancestors(self, values: Iterable[str]) -> frozenset[str]:
        """All that values are made from when all ops have run, themselves included."""
        pending = [name for value in values for name in self.at_end(value)]
        found: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += self.of(name)
        return frozenset(found)

    def _writes_since(self, name: str, before: int) -> Iterator[str]:
        places = self._writers.get(self._owner[name], ())
        last = bisect_left(places, before) - 1
        if last >= 0 and places[last] > self._graph.position[name]:
            yield self._graph.ops[places[last]].name

    @cached_property
    def _owner(self) -> Mapping[str, str]:
        if not self._differentiable:
            return self._graph.storage
        owner: dict[str, str] = {}
        for op in self._graph.ops:
            shares = self._graph.storage[op.name] != op.name and op.operator != "detach"
            owner[op.name] = owner[op.inputs[0]] if shares else op.name
        return owner

    @cached_property
    def _writers(self) -> Mapping[str, Sequence[int]]:
        """Per owner, the positions of the ops that write it."""
        found: dict[str, list[int]] = {}
        for position, op in enumerate(self._graph.ops):
            if "in_place" in op.tags:
                found.setdefault(self._owner[op.name], []).append(position)
            elif op.operator in SILENT_WRITERS:
                for storage in written_storages(self._graph, op):
                    found.setdefault(storage, []).append(position)
        return found


def dependents(graph: ModelGraph, sources: Iterable[str]) -> frozenset[str]:
    """The ops whose results depend on some values, these included.

    A value that is written with what depends on them does so from the write on: its later readers are found, its maker is not.
    """
    reads, found = Reads(graph), set(sources)
    for op in graph.ops:
        if op.kind == "call" and not found.isdisjoint(reads.of(op.name)):
            found.add(op.name)
    return frozenset(found)


class MemoryWrites:
    """The in-place writes of a stage's ops (in graph order), which decide where a copy of a tensor will not do."""

    def __init__(self, graph: ModelGraph, ops: Iterable[str]) -> None:
        self._graph = graph
        self._position, self._owner = graph.position, graph.storage
        self._last = {self._owner[name]: self._position[name] for name in ops if "in_place" in graph.by_name[name].tags}

    def is_written_later(self, tensor: str) -> bool:
        """Whether a tensor's memory is written after the tensor was made."""
        return self._last.get(self._owner[tensor], -1) > self._position[tensor]

    def need_same(self, tensor: str, reader: str) -> bool:
        """Whether a reader must have the tensor itself, no copy: it sees or makes writes, or its result aliases it."""
        owner = self._owner[tensor]
        if self.is_written_later(tensor) or (owner in self._last and self._owner[reader] == owner):
            return True
        is_writer = bool(written_storages(self._graph, self._graph.by_name[reader]))
        return is_writer and self._graph.by_name[tensor].kind == "buffer"


def reached_parameters(model: ModelGraph) -> frozenset[str]:
    """Names of the trainable parameters that some loss term depends on through differentiable ops."""
    parameters = (model.parameter_by_name[op.target] for op in map(model.by_name.__getitem__, _reached(model)) if op.kind == "parameter")
    return frozenset(each.name for each in parameters if each.trainable)


def with_reached_gradients(model: ModelGraph) -> ModelGraph:
    """The graph in which only ops that some loss term depends on through differentiable ops require a gradient.

    Others, whose results are detached in the end, would be sent gradients of zero between stages. A parameter with a gradient of zero is
    stepped, by weight decay for one; a parameter without a gradient is not.
    """
    reached = _reached(model)
    idle = {op.name for op in model.ops if op.kind == "call" and op.requires_grad and op.name not in reached}
    ops = (replace(op, requires_grad=False, backward_flops=0) if op.name in idle else op for op in model.ops)
    return replace(model, ops=tuple(ops)) if idle else model


def _reached(model: ModelGraph) -> set[str]:
    """Ops that some loss term depends on through differentiable ops."""
    reads = Reads(model, differentiable=True)
    pending = [name for term in model.loss for name in reads.at_end(term.sum)]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            op = model.by_name[name]
            pending += reads.of(name) if op.kind == "call" and op.requires_grad else ()
    return found
