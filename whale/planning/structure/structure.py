"""What the graph requires of any cut into stages: which ops stay together, and which are repeated instead of sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from whale.ir.graph import ModelGraph, Op
from whale.ir.writes import written_storages

CHEAP_FLOPS = 8
"""Most FLOPs of a repeatable op per element that it reads or writes: masks and positions are, products are not. Halved, doubled or 0: none
of 49 searches and plans differs, whose models have neither.
"""


@dataclass(frozen=True)
class Structure:
    """The graph as the planner sees it."""

    inputs: Mapping[str, tuple[str, ...]]  # per op, the ops that it reads
    repeatable: frozenset[str]  # cheap ops that derive from batch inputs, integers, constants and buffers alone
    atom_of: Mapping[str, int]  # per other call, its atom: ops of one atom share a stage
    atoms: tuple[tuple[str, ...], ...]  # per atom its ops, in graph order
    producers: tuple[frozenset[int], ...]  # per atom, the atoms that it reads, without itself
    order: tuple[int, ...]  # the atoms, producers first


def analyse(graph: ModelGraph, pinned: frozenset[str] = frozenset(), bonds: Iterable[tuple[str, str]] = ()) -> Structure:
    """Finds the structure of a graph.

    Args:
        graph: of ops.
        pinned: ops that are not repeated, although they could be.
        bonds: more pairs of ops that share a stage.
    """
    inputs = {op.name: op.inputs for op in graph.ops}
    mutated = frozenset(name for op in graph.ops for name in written_storages(graph, op))

    def reads_written(op: Op) -> bool:
        return not mutated.isdisjoint(graph.storage[name] for name in (op.name, *op.inputs))

    repeatable = _repeatable(graph, inputs, lambda op: op.name in pinned or "checks" in op.tags or reads_written(op))
    parents = {op.name: op.name for op in graph.ops if op.kind == "call" and op.name not in repeatable}
    for first, second in chain(_bonds(graph, inputs), bonds):
        if first in parents and second in parents:
            _unite(parents, first, second)
    while True:
        edges = _atom_edges(parents, inputs)
        try:
            order = tuple(TopologicalSorter(edges).static_order())
            break
        except CycleError as cycle:
            for name in cycle.args[1]:
                _unite(parents, cycle.args[1][0], name)
    return _number(graph, inputs, repeatable, parents, edges, order)


def floating_ops(graph: ModelGraph, structure: Structure) -> frozenset[str]:
    """Ops computed once that need no parameter and no gradient: they run where they are read."""
    bound = {op.name for op in graph.ops if op.kind == "parameter" or op.requires_grad}
    for op in graph.ops:
        if any(source in bound for source in structure.inputs[op.name]):
            bound.add(op.name)
    atoms = {structure.atom_of[name] for name in bound if name in structure.atom_of}
    return frozenset(name for name, atom in structure.atom_of.items() if atom not in atoms)


def _number(
    graph: ModelGraph,
    inputs: Mapping[str, tuple[str, ...]],
    repeatable: frozenset[str],
    parents: dict[str, str],
    edges: Mapping[str, set[str]],
    order: tuple[str, ...],
) -> Structure:
    roots: dict[str, list[str]] = {}
    for op in graph.ops:
        if op.name in parents:
            roots.setdefault(_root(parents, op.name), []).append(op.name)
    number = {root: index for index, root in enumerate(roots)}
    return Structure(
        inputs=inputs,
        repeatable=repeatable,
        atom_of={name: number[root] for root, names in roots.items() for name in names},
        atoms=tuple(tuple(names) for names in roots.values()),
        producers=tuple(frozenset(number[source] for source in edges[root]) for root in roots),
        order=tuple(number[root] for root in order),
    )


def _repeatable(graph: ModelGraph, inputs: Mapping[str, tuple[str, ...]], excluded: Callable[[Op], bool]) -> frozenset[str]:
    found: set[str] = set()
    for op in graph.ops:
        if op.kind != "call" or excluded(op) or op.requires_grad or "random" in op.tags:
            continue
        sources = [graph.by_name[name] for name in inputs[op.name]]
        if all(s.name in found or s.kind in ("input", "constant", "buffer") for s in sources) and _is_cheap(op, sources):
            found.add(op.name)
    return frozenset(found)


def _is_cheap(op: Op, sources: Iterable[Op]) -> bool:
    specs = [*op.outputs, *(spec for source in sources for spec in source.outputs)]
    has_rows = any(any(spec.row_factors) for spec in op.outputs)  # what has none does not count then: the example's rows decide nothing
    elements = max((spec.num_elements for spec in specs if any(spec.row_factors) or not has_rows), default=0)
    return op.forward_flops <= CHEAP_FLOPS * elements


def _bonds(graph: ModelGraph, inputs: Mapping[str, tuple[str, ...]]) -> Iterable[tuple[str, str]]:
    """Pairs of ops that share a stage.

    Only tensors are sent, so an item of a tuple stays with the tuple, and a number read from a tensor with the ops that use it. A
    tensor that is changed in place stays with its views, with the ops that change it, and with those that read it before a later
    change: a sent copy would have another state. All readers of a buffer that is changed stay together.
    """
    position, owner = graph.position, graph.storage
    last_change: dict[str, float] = {}
    first: dict[str, str] = {}
    for op in graph.ops:
        for name in written_storages(graph, op):
            last_change[name] = position[op.name] if graph.by_name[name].kind == "call" else math.inf
            first.setdefault(name, op.name)
    for op in graph.ops:
        if op.target == "operator.getitem":
            yield op.name, inputs[op.name][0]
        if owner[op.name] in first:
            yield op.name, first[owner[op.name]]
        for name in inputs[op.name]:
            if graph.by_name[name].kind == "call" and not graph.by_name[name].outputs:
                yield op.name, name
            if position[op.name] < last_change.get(owner[name], -1):
                yield op.name, first[owner[name]]
    for term in graph.loss:
        if term.weight is not None:
            yield term.sum, term.weight


def _root(parents: dict[str, str], name: str) -> str:
    while parents[name] != name:
        parents[name] = parents[parents[name]]
        name = parents[name]
    return name


def _unite(parents: dict[str, str], first: str, second: str) -> None:
    parents[_root(parents, second)] = _root(parents, first)


def _atom_edges(parents: dict[str, str], inputs: Mapping[str, tuple[str, ...]]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for name in parents:
        sources = edges.setdefault(_root(parents, name), set())
        sources.update(_root(parents, source) for source in inputs[name] if source in parents)
    for root, sources in edges.items():
        sources.discard(root)
    return edges
