"""Repeated blocks of a graph, found by their ops alone.

    prefix | block | block | block | suffix

The longest run of calls in which every block does the same as the one before, on its own parameters and on the results of that one.
What follows reads the last block only. Scopes inside blocks correspond; those around several blocks are the same in each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whale.ir.graph import REGION, Argument, ModelGraph, Op, Ref


@dataclass(frozen=True)
class RepeatedBlocks:
    """Consecutive blocks among `calls`, all calls of the graph in order."""

    calls: tuple[Op, ...]
    start: int  # of the first block
    length: int  # calls of a block
    count: int
    own: Mapping[str, str]  # per parameter op of the last but one block, that of the last

    @property
    def stop(self) -> int:
        return self.start + self.length * self.count

    @property
    def pairs(self) -> Iterator[tuple[Op, Op]]:
        """The ops of the last two blocks."""
        last = self.stop - self.length
        return zip(self.calls[last - self.length : last], self.calls[last : self.stop], strict=True)


def find_repeated_blocks(graph: ModelGraph) -> RepeatedBlocks | None:
    """The blocks that cover the most calls of a graph; of equal ones the shortest and first. None if no blocks repeat."""
    calls = tuple(op for op in graph.ops if op.kind == "call")
    numbers: dict[object, int] = {}
    bare = [numbers.setdefault(_look(graph, op), len(numbers)) for op in calls]
    spans, around, looks = _spans(calls), None, np.array(bare, dtype=np.int64)
    best: RepeatedBlocks | None = None
    for length in range(1, len(calls) // 2 + 1):
        longer = frozenset(key for key, span in spans.items() if span > length)
        if spans and longer != around:
            around = longer
            scoped = ((look, _scopes_look(op, longer)) for look, op in zip(bare, calls, strict=True))
            looks = np.array([numbers.setdefault(each, len(numbers)) for each in scoped], dtype=np.int64)
        for start, stop in _equal_stretches(looks, length):
            if best is not None and (stop - start) // length * length <= best.stop - best.start:
                continue
            for first in range(start, stop - 2 * length + 1):
                found = _checked(graph, calls, first, length, (stop - first) // length)
                if found is not None and (best is None or found.stop - found.start > best.stop - best.start):
                    best = found
                    break
    return best


def _look(graph: ModelGraph, op: Op) -> tuple[object, ...]:
    """What the corresponding ops of two blocks have in common: everything but names."""

    def shown(argument: Argument) -> object:
        if isinstance(argument, Ref):
            source = graph.by_name[argument.op]
            return source.kind, source.outputs
        return tuple(map(shown, argument)) if isinstance(argument, tuple) else (type(argument), argument)

    arguments = (*map(shown, op.args), *((key, shown(value)) for key, value in op.kwargs))
    tags = frozenset(tag for tag in op.tags if not tag.startswith(REGION))
    return op.target, arguments, op.outputs, op.forward_flops, op.backward_flops, tags, op.region is None, op.requires_grad


def _spans(calls: Sequence[Op]) -> dict[str, int]:
    """Per key of a scope, the number of calls from its first to its last."""
    first, last = dict[str, int](), dict[str, int]()
    for number, op in enumerate(calls):
        for scope in op.scope:
            first.setdefault(scope.key, number)
            last[scope.key] = number + 1
    return {key: last[key] - first[key] for key in first}


def _scopes_look(op: Op, around: Collection[str]) -> tuple[object, ...]:
    """The scopes of an op: those `around` several blocks by their key, others by what they ask for."""
    return tuple(
        scope.key if scope.key in around else (scope.kind, scope.device_count, scope.axis, scope.is_default, scope.name is None)
        for scope in op.scope
    )


def _equal_stretches(looks: NDArray[np.int64], length: int) -> Iterator[tuple[int, int]]:
    """Runs (start, stop) of two blocks or more in which every op looks like the one `length` before it."""
    equal = np.concatenate(([False], looks[:-length] == looks[length:], [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(equal))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if stop - start >= length:
            yield start, stop + length


def _checked(graph: ModelGraph, calls: tuple[Op, ...], start: int, length: int, count: int) -> RepeatedBlocks | None:
    """The blocks from a call on, if each does the same to its parameters and to the result of the one before."""
    own: dict[str, str] = {}
    for block in range(1, count):
        low = start + block * length
        same = _Correspondence(graph, {op.name: k for k, op in enumerate(calls[low - length : low])}, calls[low : low + length])
        if not all(same.holds(*pair) for pair in zip(calls[low - length : low], calls[low : low + length], strict=True)):
            return None
        own = same.own
    if not _scopes_correspond(calls[start : start + count * length], length):
        return None
    run = RepeatedBlocks(calls, start, length, count, own)
    earlier = {op.name for op in calls[start : run.stop - length]}
    outside = {source for op in (*calls[:start], *calls[run.stop :]) for source in op.inputs}
    wanted = {*graph.outputs, *(name for term in graph.loss for name in (term.sum, term.weight) if name)}
    is_open = earlier & (outside | wanted) or outside & {*own, *own.values()} or own.keys() & own.values()
    return None if is_open else run


def _scopes_correspond(calls: Sequence[Op], length: int) -> bool:
    """Whether each scope is the same in all blocks, or lies in one of them and corresponds to one of the next."""
    steps, places = dict[str, str](), dict[str, set[int]]()
    for number, op in enumerate(calls):
        for scope in op.scope:
            places.setdefault(scope.key, set()).add(number // length)
    for one, other in zip(calls, calls[length:], strict=False):
        for before, after in zip(one.scope, other.scope, strict=True):
            if steps.setdefault(before.key, after.key) != after.key:
                return False
    moved = {before: after for before, after in steps.items() if before != after}
    inside = moved.keys() | moved.values()
    return len(set(steps.values())) == len(steps) and all(len(places[key]) == 1 for key in inside)


class _Correspondence:
    """Which values of a block correspond to which of the next one; `own` maps parameter ops of the first to those of the second."""

    def __init__(self, graph: ModelGraph, first: Mapping[str, int], second: Sequence[Op]) -> None:
        self.own: dict[str, str] = {}
        self._graph, self._first = graph, first
        self._second = {op.name: number for number, op in enumerate(second)}
        self._entering: dict[str, str] = {}

    def holds(self, one: Op, other: Op) -> bool:
        """Whether the second op does with its block's values what the first does with those of its own."""
        pairs = [*zip(one.args, other.args, strict=True), *((a, b) for (_, a), (_, b) in zip(one.kwargs, other.kwargs, strict=True))]
        return all(self._corresponds(a, b) for a, b in pairs)

    def _corresponds(self, a: Argument, b: Argument) -> bool:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return all(self._corresponds(x, y) for x, y in zip(a, b, strict=True))
        if not isinstance(a, Ref) or not isinstance(b, Ref):
            return True  # literals look alike already
        if b.op in self._second:
            return self._first.get(a.op) == self._second[b.op]
        if b.op in self._first:  # made by the block before it
            return a.op not in self._first and self._entering.setdefault(b.op, a.op) == a.op
        if a.op == b.op:
            return True
        kinds = {self._graph.by_name[name].kind for name in (a.op, b.op)}
        return kinds <= {"parameter", "buffer"} and self.own.setdefault(a.op, b.op) == b.op
