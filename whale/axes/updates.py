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

How each value combines over rows (`whale.axes.over_rows`) is found in one pass over the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whale.axes.discover import discover
from whale.axes.mixing import RowRoles
from whale.axes.operators import Operator, Rows, entry_of_call
from whale.axes.operators.entry import SHAPED
from whale.axes.outcome import argument
from whale.axes.over_rows import ADDITIVE, CONSTANT, PER_ROW, Combining, Kind, joint, operands_of
from whale.axes.values import Axes
from whale.ir.graph import ModelGraph, Op, Ref
from whale.ir.plan import Replica
from whale.ir.scope import SourceLine
from whale.ir.writes import SILENT_WRITERS, Reads, dependents, written_buffers, written_storages


@dataclass(frozen=True, slots=True)
class Of:
    """What a value is."""

    kind: Kind
    name: str = ""  # of ``held`` and ``grown``, the buffer; of ``other``, the first op that made it so
    scale: float = 1.0  # of ``held`` and ``grown``, the factor on the buffer's old value


class OverRows:
    """Walks the ops in order; records what each value is, and what each written memory then holds."""

    def __init__(self, graph: ModelGraph, axes: Axes) -> None:
        self._graph, self._roles = graph, RowRoles(graph, axes.in_rows)
        # a constant may be the number of rows in a capture for so many, unless it has found out which constants are
        self._may_be_rows = not graph.dynamic and not any(graph.users[op.name] for op in graph.ops if op.kind == "input" and not op.outputs)
        self._values: dict[str, Of] = {}
        self._memory: dict[str, tuple[int, Of]] = {}
        for position, op in enumerate(graph.ops):
            self._values[op.name] = self._source(op) if op.kind != "call" else self._call(op)
            for storage in written_storages(graph, op):
                self._memory[storage] = position, self._written(op, storage)

    def value(self, op: str) -> Of:
        return self._values[op]

    def in_memory(self, op: str) -> Of:
        """The final content of the memory of an op's result."""
        storage = self._graph.storage[op]
        return self._memory[storage][1] if storage in self._memory else self._values[storage]

    def is_all_of(self, name: str, buffer: str) -> bool:
        """Whether a result has the elements of a buffer in their places, in its memory."""
        return self._graph.storage[name] == buffer and self._place(name) == ()

    def _source(self, op: Op) -> Of:
        if op.kind == "buffer":
            return Of("held", self._graph.parameter_by_name[op.target].name)
        if self._roles.reason(op):
            return Of("other", op.name)
        if self._roles.has_rows(op.name):
            return Of("rows")
        return Of("count" if op.kind == "input" and not op.outputs else "constant")

    def _now(self, name: str) -> Of:
        """What a value is now: as it was made, or as it was written since."""
        position, of = self._memory.get(self._graph.storage[name], (-1, Of("constant")))
        return of if position > self._graph.position[name] else self._values[name]

    def _written(self, op: Op, storage: str) -> Of:
        """What a memory holds after an op has written all or part of it."""
        if "in_place" not in op.tags:  # running statistics
            return Of("other", op.name)
        written = self._values[op.name]
        before = self._memory[storage][1] if storage in self._memory else self._values[storage]
        if op.inputs[0] == storage or before == written or self.is_all_of(op.name, storage):
            return written
        kinds = {before.kind, written.kind}
        if kinds == {"held", "grown"} and before.scale == written.scale:
            return before if before.kind == "grown" else written
        if "rows" in kinds:
            return Of("rows") if kinds <= PER_ROW else Of("other", op.name)
        found = joint((before.kind, written.kind))
        return Of("other", op.name) if found is None else Of(found)

    def _call(self, op: Op) -> Of:
        entry, has_rows = entry_of_call(op.target), self._roles.has_rows(op.name)
        is_unknown = not has_rows and op.has_own_size
        is_unknown = is_unknown or self._roles.has_rows_twice(op.name)  # its size is in no proportion to the rows
        if entry.rows in SHAPED and not is_unknown:
            return Of("rows") if has_rows else Of("zero" if entry.rows == "zeros" else "constant")
        is_filled = entry.rows == "filled"  # of a tensor it takes the shape
        read = [self._now(name) for name in op.inputs if not (is_filled and self._graph.by_name[name].outputs)]
        bad = next((of for of in read if of.kind == "other"), None)
        if bad is not None or is_unknown:
            return bad or Of("other", op.name)
        kinds = {of.kind for of in read}
        if has_rows:
            sizes: set[Kind] = {"count"} if entry.rows in ("moved", "filled") else set()
            found = Of("rows") if kinds <= PER_ROW | sizes and not self._roles.reason(op) else None
        else:
            found = self._of_constants(op, entry, read) if kinds <= CONSTANT else self._combined(op, entry)
        return found or Of("other", op.name)

    def _of_constants(self, op: Op, entry: Operator, read: Sequence[Of]) -> Of:
        if entry.rows == "copied":
            return read[-1]
        if len(read) == 1 and read[0].kind == "held" and (factor := _factor(op, entry)) is not None:
            return replace(read[0], scale=read[0].scale * factor)
        return read[0] if read and (entry.rows == "same" or "view" in op.tags) else Of("constant")

    def _combined(self, op: Op, entry: Operator) -> Of | None:
        """What an op that has no rows makes of values per row, sums, means, counts and constants."""
        if self._roles.reads_positions(op) or "rounding_mode" in dict(op.kwargs):
            return None
        given, named = operands_of(entry, op.args, dict(op.kwargs), self._is_tensor)
        operands, options = list(map(self._of, given)), list(map(self._of, named))
        call = Combining(
            entry,
            [of.kind for of in operands],
            [self._graph.by_name[each.op].outputs[0].shape if isinstance(each, Ref) and self._is_tensor(each) else None for each in given],
            [of.kind for of in options],
            self._roles.combination(op.name),
            argument(op, 3, "accumulate") is True,
            self._rounds(op),
            self._may_be_rows,
        )
        if call.adds_rows:
            return self._added(op, operands[0], Of("sum"))
        if call.reads_rows or not CONSTANT.issuperset(call.options):
            return None if call.kind is None else Of(call.kind)
        if entry.rows == "copied":
            return self._copied(op, operands[1])
        share = argument(op, 2, "weight") if entry.rows == "interpolated" else 0
        if entry.rows in ("added", "subtracted", "interpolated") and isinstance(share, (int, float)):
            left = replace(operands[0], scale=operands[0].scale * (1 - share))
            return self._added(op, left, operands[1] if len(operands) > 1 else Of("constant"))
        if operands[0].kind == "grown" and (entry.rows == "same" or "view" in op.tags):
            return operands[0]
        kind = call.kind
        return None if kind in (None, "grown") else Of("sum" if op.outputs and kind == "count" else kind)

    def _is_tensor(self, argument: object) -> bool:
        return isinstance(argument, Ref) and bool(self._graph.by_name[argument.op].outputs)

    def _of(self, argument: object) -> Of:
        return self._now(argument.op) if isinstance(argument, Ref) else Of("constant")

    def _added(self, op: Op, left: Of, right: Of) -> Of | None:
        """The sum or difference of two values."""
        kind = joint((left.kind, right.kind))
        if kind is not None:
            return Of("count" if kind == "sum" and not op.outputs else kind)
        base, grows = (left, right) if left.kind in ("held", "grown") else (right, left)
        if base.kind not in ("held", "grown") or grows.kind not in ADDITIVE:
            return None
        if base is right and (entry_of_call(op.target).rows != "added" or op.kwargs):  # a factor ``alpha``
            return None
        return None if self._place(op.name) is None else Of("grown", base.name, base.scale)

    def _copied(self, op: Op, value: Of) -> Of | None:
        """A value written over the old one."""
        if value.kind == "sum":
            return None if self._graph.by_name[self._graph.storage[op.name]].kind == "buffer" else value
        is_there = value.kind == "grown" and self._place(op.inputs[0]) == self._place(op.inputs[1])
        return value if value.kind == "mean" or is_there else None

    def _place(self, name: str) -> tuple[str, ...] | None:
        """Where in a buffer lie the elements that a value has, or has added to: the views on the way; None if nowhere."""
        op = self._graph.by_name[name]
        if op.kind == "buffer":
            return ()
        if entry_of_call(op.target).rows in _IN_PLACES or "in_place" in op.tags:
            return next((place for place in map(self._place, op.inputs) if place is not None), None)
        outer = self._place(op.inputs[0]) if "view" in op.tags else None
        return None if outer is None else (*outer, f"{op.target} {op.args[1:]} {op.kwargs}")

    def _rounds(self, op: Op) -> bool:
        """Whether a change of dtype loses what sums and means need."""
        sources = [spec for name in op.inputs[:1] for spec in self._graph.by_name[name].outputs]
        both = list(zip(sources, op.outputs, strict=False))
        is_truth = any(b.dtype == "bool" != a.dtype for a, b in both)
        return is_truth or any("float" in a.dtype and "float" not in b.dtype for a, b in both)


_IN_PLACES: frozenset[Rows | None] = frozenset({"same", "multiplied", "divided", "added", "subtracted", "interpolated"})
"""Operators each element of whose result is in the place of one of the first operand."""


def _factor(op: Op, entry: Operator) -> float | None:
    """The number that a product multiplies its one tensor by; None for any other op."""
    numbers = [each for each in op.args[:2] if isinstance(each, (int, float))]
    if entry.rows not in ("multiplied", "divided") or len(op.args) != 2 or len(numbers) != 1 or op.kwargs:
        return None
    if entry.rows == "divided":
        return 1 / numbers[0] if numbers[0] and op.args[1] is numbers[0] else None
    return float(numbers[0])


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
