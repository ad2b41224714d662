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

Each value as a function of the rows of a part of the batch:

constant              the same for any rows; zeros and old values of buffers are distinguished
rows                  one value per row
count                 a multiple of the number of rows
sum                   parts add up to the whole
mean                  parts, averaged by their rows, give the whole: means, and what is linear in them
grown                 a multiple of a buffer's old value, plus a sum
other                 none of these
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import Replica
from whale.ir.scope import SourceLine
from whale.ir.writes import SILENT_WRITERS, Reads, dependents, written_buffers, written_storages

Kind = Literal["zero", "held", "constant", "rows", "count", "sum", "mean", "grown", "other"]

CONSTANT: frozenset[Kind] = frozenset({"zero", "held", "constant"})
ADDITIVE: frozenset[Kind] = frozenset({"count", "sum"})
PER_ROW: frozenset[Kind] = frozenset({"rows", *CONSTANT})
AVERAGED: frozenset[Kind] = frozenset({"mean", *CONSTANT})

ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
SHAPE_ONLY = ZEROS | {"ones_like", "full_like", "empty_like", "new_ones", "new_full", "new_empty"}
UNMOVED = frozenset({"detach", "alias", "clone"})  # ops whose result has the elements of the argument in the same positions

LINEAR = UNMOVED | {
    "view", "reshape", "_unsafe_view", "view_as", "reshape_as", "expand", "expand_as", "permute", "transpose", "t", "squeeze", "unsqueeze",
    "select", "slice", "contiguous", "to", "_to_copy", "type_as", "neg", "flatten", "unflatten", "sum", "mean", "scalar_tensor",
}  # fmt: skip
DIVISIONS = frozenset({"div", "divide", "true_divide"})
PRODUCTS = DIVISIONS | {"mul", "multiply", "matmul", "mm", "mv"}
SCALINGS = frozenset({"mul", "multiply", "div", "divide", "true_divide"})
SUMS = frozenset({"sum", "matmul", "mm", "mv", "einsum", "bincount"})
SCATTERS = frozenset({"index_add", "scatter_add"})


@dataclass(frozen=True, slots=True)
class Of:
    """What a value is."""

    kind: Kind
    name: str = ""  # of ``held`` and ``grown``, the buffer; of ``other``, the first op that made it so
    scale: float = 1.0  # of ``held`` and ``grown``, the factor on the buffer's old value


class OverRows:
    """Walks the ops in order; records what each value is, and what each written memory then holds."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
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
        if op.kind == "input":
            has_rows = any(spec.has_rows for spec in op.outputs)
            return Of("rows") if has_rows else Of("constant") if op.outputs else Of("count")
        return Of("held", self._graph.parameter_by_name[op.target].name) if op.kind == "buffer" else Of("constant")

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
        kinds = {before.kind, written.kind}
        if op.inputs[0] == storage or before == written:
            return written
        if (
            kinds == {"zero", "sum"}
            or (kinds == {"held", "grown"} and before.scale == written.scale)
            or ("rows" in kinds and kinds <= PER_ROW)
        ):
            return written if before.kind in CONSTANT else before
        if kinds <= CONSTANT:
            return Of("constant")
        return Of("mean") if kinds <= AVERAGED else Of("other", op.name)

    def _call(self, op: Op) -> Of:
        has_rows = any(spec.has_rows for spec in op.outputs)
        if op.operator in SHAPE_ONLY:
            return Of("rows") if has_rows else Of("zero" if op.operator in ZEROS else "constant")
        read = [self._now(name) for name in op.inputs]
        bad = next((of for of in read if of.kind == "other"), None)
        if bad is not None or any(factor < 0 for spec in op.outputs for factor in spec.row_factors):
            return bad or Of("other", op.name)
        kinds = [of.kind for of in read]
        if CONSTANT.issuperset(kinds):
            return self._of_constants(op, read)
        if op.operator in SCATTERS or (op.operator == "index_put" and op.args[3:4] == (True,)):
            return (self._added(op, read[0], Of("sum")) if PER_ROW.issuperset(kinds[1:]) else None) or Of("other", op.name)
        found = self._of_rows(op, kinds, has_rows) if "rows" in kinds else self._of_sums(op, read)
        return found or Of("other", op.name)

    def _of_constants(self, op: Op, read: Sequence[Of]) -> Of:
        if op.operator == "copy":
            return read[-1]
        if len(read) == 1 and read[0].kind == "held" and op.operator in SCALINGS and (factor := _factor(op)) is not None:
            return replace(read[0], scale=read[0].scale * factor)
        return read[0] if read and (op.operator in UNMOVED or "view" in op.tags) else Of("constant")

    def _of_rows(self, op: Op, kinds: Sequence[Kind], has_rows: bool) -> Of | None:
        """An op on values per row: again such values, or their sum or mean."""
        if has_rows:
            is_per_row = PER_ROW.issuperset(kinds) or ((PER_ROW | {"count"}).issuperset(kinds) and op.operator not in PRODUCTS)
            return Of("rows") if is_per_row else None
        if not PER_ROW.issuperset(kinds) or not op.outputs:
            return None
        return Of("sum") if op.operator in SUMS else Of("mean") if op.operator == "mean" else None

    def _of_sums(self, op: Op, read: Sequence[Of]) -> Of | None:
        """An op on sums, means and counts."""
        kinds = [of.kind for of in read]
        if op.operator == "copy":
            return self._copied(op, read[-1])
        if op.operator in ("add", "sub", "rsub"):
            return self._added(op, read[0], read[1] if len(read) > 1 else Of("constant"))
        if op.operator == "lerp":
            if AVERAGED.issuperset(kinds[:2]) and CONSTANT.issuperset(kinds[2:]):
                return Of("mean")
            share = op.args[2] if len(op.args) > 2 else None
            left = replace(read[0], scale=read[0].scale * (1 - share)) if isinstance(share, (int, float)) else None
            return None if left is None or left.kind != "held" else self._added(op, left, read[1])
        if op.operator in DIVISIONS and kinds == ["sum", "count"]:
            return Of("mean")
        if op.operator in PRODUCTS:
            return self._scaled(op, read)
        if op.operator not in LINEAR or not CONSTANT.issuperset(kinds[1:]) or self._rounds(op):
            return None
        is_moved = kinds[0] == "grown" and op.operator not in UNMOVED and "view" not in op.tags
        return None if is_moved else read[0]

    def _scaled(self, op: Op, read: Sequence[Of]) -> Of | None:
        """The product of one value that varies with constants, or the quotient by one."""
        varying = [of for of in read if of.kind not in CONSTANT]
        if not self._graph.dynamic and varying[0].kind in ADDITIVE:
            return None  # the constant may be the number of rows
        divides_by_it = op.operator in DIVISIONS and read[0] is not varying[0]
        if len(varying) > 1 or varying[0].kind == "grown" or divides_by_it or "rounding_mode" in dict(op.kwargs):
            return None
        return Of("sum") if varying[0].kind == "count" and op.outputs else varying[0]

    def _added(self, op: Op, left: Of, right: Of) -> Of | None:
        """The sum or difference of two values."""
        kinds = {left.kind, right.kind}
        if kinds <= ADDITIVE | {"zero"}:
            return Of("sum" if op.outputs else "count")
        if kinds <= AVERAGED:
            return Of("mean")
        base, grows = (left, right) if left.kind in ("held", "grown") else (right, left)
        if base.kind not in ("held", "grown") or grows.kind not in ADDITIVE or (op.operator != "add" and base is right):
            return None
        return None if op.operator == "rsub" or self._place(op.name) is None else Of("grown", base.name, base.scale)

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
        if op.operator in UNMOVED | SCALINGS | {"add", "sub", "lerp"} or "in_place" in op.tags:
            return next((place for place in map(self._place, op.inputs) if place is not None), None)
        outer = self._place(op.inputs[0]) if "view" in op.tags else None
        return None if outer is None else (*outer, f"{op.target} {op.args[1:]} {op.kwargs}")

    def _rounds(self, op: Op) -> bool:
        """Whether a change of dtype loses precision that sums and means need."""
        sources = [spec for name in op.inputs[:1] for spec in self._graph.by_name[name].outputs]
        return any("float" in a.dtype and "float" not in b.dtype for a, b in zip(sources, op.outputs, strict=False))


def _factor(op: Op) -> float | None:
    """The number that a product multiplies its one tensor by; None for any other op."""
    numbers = [each for each in op.args[:2] if isinstance(each, (int, float))]
    if len(op.args) != 2 or len(numbers) != 1 or op.kwargs:
        return None
    if op.operator in DIVISIONS:
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
    """The buffers that forward writes, by name."""
    written = written_buffers(graph)
    marked = {name: ops for name, ops in written.items() if any(op.operator not in SILENT_WRITERS for op in ops)}
    found = _updates(graph, marked) if marked else {}
    return {name: found.get(name) or _statistics(ops) for name, ops in written.items()}


def _statistics(writers: Sequence[Op]) -> Update:
    """Statistics of the batch are no means over rows; those of each row are averaged over them."""
    of_rows = all(op.operator == "instance_norm" for op in writers)
    return Update("mean" if of_rows else "statistics", where=writers[-1].where)


def _updates(graph: ModelGraph, written: Mapping[str, tuple[Op, ...]]) -> dict[str, Update]:
    over_rows = OverRows(graph)
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
