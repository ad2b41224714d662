"""What forward writes into buffers, by what it depends on: how parts of the batch make the value that the whole batch would.

    count += 1                            the same from any rows             once
    vector.copy_(normalize(w @ vector))
    ema.mul_(0.9).add_(0.1 * x.mean(0))   linear in means over rows          mean      parts are averaged by their rows
    load += chosen.sum(0)                 what was there, and sums           sum       what the parts add is added up
    instance_norm(...)                    means of each row's statistics     mean
    batch_norm(...)                       running statistics                 statistics
    ema.lerp_(x.var(0), 0.1)              none of these                      whole     right for an undivided batch only

Every part of a batch (a micro-batch of a replica) starts from what the buffer held before the step. The exception are
running statistics: they follow one micro-batch after another, as those of the plain model do that is given them so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from whale.ir.graph import ModelGraph, Op
from whale.ir.over_rows import CONSTANT, OverRows
from whale.ir.source import SourceLine
from whale.ir.writes import SILENT_WRITERS, Reads, dependents, written_buffers

UpdateKind = Literal["once", "mean", "sum", "statistics", "whole"]


@dataclass(frozen=True, slots=True)
class Update:
    """What forward writes into one buffer.

    Attributes:
        kind: how the parts of a batch make it up.
        reason: of ``whole``, why they do not.
        where: the user's line of the last write.
    """

    kind: UpdateKind
    reason: str = ""
    where: SourceLine | None = None


def buffer_updates(graph: ModelGraph) -> Mapping[str, Update]:
    """The buffers that forward writes, by name."""
    written = written_buffers(graph)
    marked = {name: ops for name, ops in written.items() if any(op.operator not in SILENT_WRITERS for op in ops)}
    found = _updates(graph, marked) if marked else {}
    return {name: found.get(name) or _statistics(ops) for name, ops in written.items()}


def _statistics(writers: Sequence[Op]) -> Update:
    """Those of the batch are no means over rows; those of each row are averaged over them."""
    of_rows = all(op.operator == "instance_norm" for op in writers)
    return Update("mean" if of_rows else "statistics", where=writers[-1].where)


def _updates(graph: ModelGraph, written: Mapping[str, tuple[Op, ...]]) -> dict[str, Update]:
    over_rows = OverRows(graph)
    random = dependents(graph, (op.name for op in graph.ops if "random" in op.tags))
    results = [name for term in graph.loss for name in (term.sum, term.weight) if name is not None]
    needed = Reads(graph).ancestors((*results, *graph.outputs))
    found = {}
    for name, writers in written.items():
        of, where = over_rows.in_memory(writers[-1].name), writers[-1].where
        changing = {op.name for op in writers if over_rows.value(op.name).kind not in CONSTANT}
        if any(op.operator in SILENT_WRITERS for op in writers):
            found[name] = Update("whole", "running statistics that are written otherwise too", where)
        elif any(op.name in random for op in writers):
            found[name] = Update("whole", "it depends on random numbers", where)
        elif of.kind in CONSTANT:
            found[name] = Update("once", where=where)
        elif not needed.isdisjoint(changing):
            found[name] = Update("whole", "it is read after it was written from rows", where)
        elif of.kind == "mean" or (of.kind == "grown" and of.name == name):
            found[name] = Update("mean" if of.kind == "mean" else "sum", where=where)
        else:
            culprit = graph.by_name[of.name] if of.kind == "other" else writers[-1]
            found[name] = Update("whole", f"{culprit.target} (%{culprit.name}) makes it neither", where)
    return found
