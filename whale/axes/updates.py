"""What forward writes into buffers, and how parts of the batch combine to the value that the whole batch would write.

    count += 1                            the same from any rows             once
    vector.copy_(normalize(w @ vector))
    ema.mul_(0.9).add_(0.1 * x.mean(0))   linear in means over rows          mean      parts are averaged by their rows
    load += chosen.sum(0)                 the old value, and sums            sum       the increments of the parts are added
    load.mul_(0.9).add_(chosen.sum(0))    a multiple of the old value        sum       likewise, to that multiple
    codebook.copy_(ema / load)            of new values of buffers          derived   computed again from what the parts give together
    instance_norm(...)                    means of each row's statistics     mean
    batch_norm(...)                       running statistics                 statistics
    ema.lerp_(x.var(0), 0.1)              none of these                      whole     right for an undivided batch only

Every part of a batch (a micro-batch of a replica) starts from the buffer's value before the step. Only running statistics follow one
micro-batch after another, as in the plain model that is given them so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from whale.axes.discover import discover
from whale.axes.rows import CONSTANT, OverRows
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import Replica
from whale.ir.scope import SourceLine
from whale.ir.writes import SILENT_WRITERS, Reads, dependents, written_buffers

UpdateKind = Literal["once", "mean", "sum", "derived", "statistics", "whole"]


@dataclass(frozen=True, slots=True)
class Derivation:
    """How the new value of a buffer follows from those of others."""

    ops: frozenset[str]  # that compute it
    given: Mapping[str, str]  # ops that they read, which are other buffers after all writes, with the names of these
    result: str  # the last write


@dataclass(frozen=True, slots=True)
class Update:
    """What forward writes into one buffer."""

    kind: UpdateKind  # how the parts of a batch combine
    scale: float = 1.0  # of ``sum``, the factor on the old value
    reason: str = ""  # of ``whole``, why they do not
    where: SourceLine | None = None  # the user's line of the last write
    derivation: Derivation | None = None  # of ``derived``


def num_parts(name: str, replicas: Sequence[Replica]) -> int:
    """In how many parts of a batch a buffer is written."""
    groups = (max((len(stage.shares) for stage in own.stages if name in stage.parameters), default=0) for own in replicas)
    return sum(count * own.pipeline.num_micro_batch for count, own in zip(groups, replicas, strict=True))


def buffer_updates(graph: ModelGraph) -> Mapping[str, Update]:
    """The buffers that forward writes, by name. Found once for a graph, and kept with it as its cached properties are."""
    known: Mapping[str, Update] | None = vars(graph).get(_KEPT)
    if known is None:
        known = vars(graph)[_KEPT] = _buffer_updates(graph)
    return known


_KEPT = "buffer_updates"


def _buffer_updates(graph: ModelGraph) -> Mapping[str, Update]:
    written = written_buffers(graph)
    marked = {name: ops for name, ops in written.items() if any(op.operator not in SILENT_WRITERS for op in ops)}
    found = _updates(graph, marked) if marked else {}
    return {name: found.get(name) or _statistics(ops) for name, ops in written.items()}


def _statistics(writers: Sequence[Op]) -> Update:
    """Statistics of the batch are no means over rows; those of each row are averaged over them."""
    of_rows = all(op.operator == "instance_norm" for op in writers)
    return Update("mean" if of_rows else "statistics", where=writers[-1].where)


def _updates(graph: ModelGraph, written: Mapping[str, tuple[Op, ...]]) -> dict[str, Update]:
    over_rows = OverRows(graph, discover(graph))
    random = dependents(graph, (op.name for op in graph.ops if "random" in op.tags))
    results = [name for term in graph.loss for name in (term.sum, term.weight) if name is not None]
    needed = Reads(graph).ancestors((*results, *graph.outputs))
    found: dict[str, Update] = {}
    open_ones: list[str] = []
    for name, writers in written.items():
        of, where = over_rows.in_memory(writers[-1].name), writers[-1].where
        changing = {op.name for op in writers if over_rows.value(op.name).kind not in CONSTANT}
        if any(op.operator in SILENT_WRITERS for op in writers):
            found[name] = Update("whole", reason="other ops write these running statistics too", where=where)
        elif any(op.name in random for op in writers):
            found[name] = Update("whole", reason="it depends on random numbers", where=where)
        elif of.kind in CONSTANT:
            found[name] = Update("once", where=where)
        elif not needed.isdisjoint(changing):
            found[name] = Update("whole", reason="it is read after it was written from rows", where=where)
        elif of.kind == "mean" or (of.kind == "grown" and of.name == name):
            found[name] = Update("mean" if of.kind == "mean" else "sum", of.scale, where=where)
        else:
            culprit = graph.by_name[of.name] if of.kind == "other" else writers[-1]
            found[name] = Update("whole", reason=f"{culprit.target} (%{culprit.name}) gives neither", where=where)
            open_ones.append(name)
    for name in sorted(open_ones, key=lambda name: graph.position[written[name][-1].name]):
        others = {graph.storage[ops[-1].name]: other for other, ops in written.items() if other != name}
        derivation = _Deriving(graph, over_rows, others, written).of(written[name][-1]) if others else None
        if derivation is not None and all(found[other].kind != "whole" for other in derivation.given.values()):
            found[name] = Update("derived", where=found[name].where, derivation=derivation)
    return found


class _Deriving:
    """Finds out whether a buffer is computed from the new values of others, and from nothing else that rows change."""

    def __init__(self, graph: ModelGraph, over_rows: OverRows, others: Mapping[str, str], written: Mapping[str, tuple[Op, ...]]) -> None:
        self._graph, self._over_rows, self._others = graph, over_rows, others
        self._complete = {storage: graph.position[written[name][-1].name] for storage, name in others.items()}  # their last writes
        self._reads = Reads(graph)

    def of(self, last: Op) -> Derivation | None:
        ops: set[str] = set()
        given: dict[str, str] = {}
        pending = [last.name]
        while pending:
            name = pending.pop()
            op, storage = self._graph.by_name[name], self._graph.storage[name]
            if name in ops or name in given or op.kind in ("constant", "buffer"):
                if name in self._others:
                    given[name] = self._others[name]
                continue
            if op.kind != "call" or "random" in op.tags:
                return None
            if storage in self._others and self._over_rows.is_all_of(name, storage):
                given[name] = self._others[storage]
                continue
            if storage in self._others and "view" not in op.tags:
                return None
            reads_early = (self._complete.get(self._graph.storage[each], -1) > self._graph.position[name] for each in op.inputs)
            if "view" not in op.tags and any(reads_early):
                return None
            ops.add(name)
            pending += self._reads.of(name)
        return Derivation(frozenset(ops), given, last.name)
