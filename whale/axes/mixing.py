"""Ops that mix samples: what a cut of the batch would change.

An op mixes samples if it needs rows whole, combines them, or computes with their number or positions. Exceptions: the sums from rows to an
exact term of the loss, which add up over pieces of the batch; what neither the loss nor an output depends on (but for conditions that
decide which ops run), such as writes into a buffer; bags of as many words for each row (`EmbeddingBag` of ids [b w]); and conditions that
parts of the batch can decide for the whole.

    h [b d] -> mean [d]  -> sub [b d] -> mse []    mean mixes: a piece has another mean
    h [b d] -> sum [d]   -> sum []       (a term)  adds up

Parts can decide a condition on the greatest, or least, of something per row: if all parts find the same, it holds for the whole.

    x [b d] -> gt [b d] -> any []                 true for the whole if for some part
    x [b d] -> amax [] -> lt [] -> logical_not    the same
    x [b d] -> sum [] -> gt []                    parts cannot decide
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Literal

from whale.axes.atoms import ROWS
from whale.axes.operators import Rows, entry_of_call
from whale.axes.outcome import CONTRACTED_AND_KEPT, MAKES, NO_RULE, NUMBERS, READS, TWICE, argument
from whale.axes.values import Dimension, InRows, Mixing, Role, axes_of
from whale.ir.graph import LossTerm, ModelGraph, Op, Ref
from whale.ir.writes import Reads, written_storages


def find_mixing(graph: ModelGraph, known: InRows) -> tuple[Mixing, ...]:
    """Ops that need the batch whole or combine samples, and terms of the loss that are no sum over samples."""
    return tuple(_found(graph, RowRoles(graph, known)))


def _found(graph: ModelGraph, roles: RowRoles) -> Iterator[Mixing]:
    terms = {term.sum: term for term in graph.loss if not term.exact}
    results = [name for term in graph.loss for name in (term.sum, term.weight) if name is not None]
    deciding = [op.name for op in graph.ops if "decides" in op.tags]
    needed = Reads(graph).ancestors([*results, *graph.outputs, *deciding] or graph.by_name)
    chains = {name for term in graph.loss for name in _chain(graph, roles, term)}
    chains |= {name for decision in deciding for name in decided_by_parts(graph, decision, roles.combination)}
    inner = {name for name in chains if all(user in chains for user in graph.users[name])}
    added_up = {name for name in inner if not roles.reads_positions(graph.by_name[name])}
    for op in graph.ops:
        if op.name in terms:
            term = terms[op.name]
            yield Mixing(op.name, term.reason, term.where, "mixes")
        elif op.name in needed and op.name not in added_up and (reason := roles.reason(op)):
            yield Mixing(op.name, reason, op.where, "no rule" if reason.endswith(_CANNOT_TELL) else "mixes")


def _chain(graph: ModelGraph, roles: RowRoles, term: LossTerm) -> set[str]:
    """The ops between rows and a term: its sum and weight, and back to the ops whose operands have rows."""
    found: set[str] = set()
    waiting = [name for name in (term.sum, term.weight) if name is not None]
    while waiting:
        name = waiting.pop()
        if name in found or name not in graph.by_name or roles.has_rows(name):
            continue
        found.add(name)
        waiting += graph.by_name[name].inputs
    return found


class RowRoles:
    """What each op of a graph does with rows."""

    def __init__(self, graph: ModelGraph, known: InRows) -> None:
        self._graph, self._ops, self._rows, self._selected = graph, known.ops, known.rows, known.selected
        self._places, self._uncounted = known.positions, known.uncounted
        self._positions = {
            name: dims for name, dims in known.positions.items() if any(not self._rows.isdisjoint(axes_of(dim)) for dim in dims)
        }
        bags = {op.name: offsets for op in graph.ops if op.operator == "embedding_bag" and (offsets := self._even_bags(op))}
        # what it counts is only where each row's own words begin
        self._bags = {*bags, *(name for name in bags.values() if all(user in bags for user in graph.users[name]))}

    def reads_positions(self, op: Op) -> bool:
        """Whether an op reads positions of rows."""
        return not self._positions.keys().isdisjoint(op.inputs)

    def has_rows(self, name: str, times: int = 1) -> bool:
        """Whether a result of an op has rows, or one axis of them so many times."""
        if name not in self._ops:
            return False
        results = ([axis for dim in dims for axis in axes_of(dim)] for dims in self._ops[name].outputs)
        return any(met.count(axis) >= times for met in results for axis in self._rows)

    def has_rows_twice(self, name: str) -> bool:
        """Whether a result of an op has several axes of rows, or one several times."""
        made = self._ops[name].outputs if name in self._ops else ()
        return any(sum(axis in self._rows for dim in dims for axis in axes_of(dim)) > 1 for dims in made)

    def combination(self, name: str) -> str:
        """How an op combines rows to something that has none, or "" for not at all, or a mean over rows that are not counted."""
        if name not in self._ops or self.has_rows(name) or self.reads_positions(self._graph.by_name[name]):
            return ""
        roles = {axis: role for axis, role in self._ops[name].roles.items() if axis in self._rows}
        how = combination(roles.values())
        return "" if how == "mean" and not self._uncounted.isdisjoint(roles) else how

    def reason(self, op: Op) -> str:
        """Why an op mixes samples; "" if it does not."""
        if op.name not in self._ops or op.name in self._bags:
            return ""
        if op.kind == "constant" and self.has_rows(op.name):
            return f"a tensor made by the model's code ({op.target}) has a value for each row"
        if op.kind == "constant" and "reads_rows" in op.tags:
            return f"a tensor made by the model's code ({op.target}) depends on the number of rows"
        if op.name not in self._places and any(self._are_values(op, name) for name in op.inputs if name in self._positions):
            return f"{op.target} computes with the positions of rows"
        known, looked_up = self._ops[op.name].roles, self._looked_up(op)
        roles = [role for axis, role in known.items() if axis in self._rows and not (axis in looked_up and role in _LOOKUPS)]
        return next((reason for role in roles if (reason := self._reason_of(op, role))), "")

    def _reason_of(self, op: Op, role: Role) -> str:
        if role.kind == "contracted":
            return f"combines samples by {role.combine} ({op.target})"
        if role == NUMBERS:
            return "" if op.name in self._positions else f"{op.target} {role.reason}, here those of rows"
        if role.kind not in ("whole", "pooled") or self._is_inherited(op, role):
            return ""
        return f"{op.target}: no rule{_CANNOT_TELL}" if role == NO_RULE else f"{op.target} {role.reason}"

    def _is_inherited(self, op: Op, role: Role) -> bool:
        """Whether the op only meets rows twice because an operand has them twice already."""
        return role in (TWICE, CONTRACTED_AND_KEPT) and any(self.has_rows(name, times=2) for name in op.inputs)

    def _are_values(self, op: Op, positions: str) -> bool:
        """Whether an op computes with positions of rows. As an index of those very rows they change nothing."""
        uses = [dims for index, dims in self._indexed(op) if index == positions]
        return not uses or any(self._positions[positions] != dims for dims in uses)

    def _indexed(self, op: Op) -> Iterator[tuple[str, tuple[Dimension, ...]]]:
        """The tensors that index others in an op, each with the dimensions that it indexes."""
        source, index, indexed = op.args[0] if op.args else None, argument(op, 2, "index"), entry_of_call(op.target).indexed
        if not isinstance(source, Ref) or (indexed is None and not _selects(op)):
            return
        dims = self._ops[source.op].outputs[0]
        if _selects(op):
            yield source.op, dims
        elif indexed == "per dimension":
            for place, item in enumerate(op.args[1] if isinstance(op.args[1], tuple) else ()):
                if isinstance(item, Ref):
                    yield item.op, dims[place : place + (len(self._ops[item.op].outputs[0]) if self._is_mask(item.op) else 1)]
        elif isinstance(index, Ref) and isinstance(op.args[1], int) and dims:
            yield index.op, (dims[op.args[1] % len(dims)],)

    def _looked_up(self, op: Op) -> Set[str]:
        """The axes in which an op chooses rows by a mask or its positions, each for itself."""
        found: set[str] = set()
        for index, dims in self._indexed(op):
            if self._is_mask(index) or _selects(op):
                found.update(self._selected, *map(axes_of, dims))
            elif self._positions.get(index) == dims:
                found.update(*map(axes_of, (*dims, *self._ops[index].outputs[0])))
        return found

    def _is_mask(self, name: str) -> bool:
        return self._graph.by_name[name].outputs[0].dtype in ("bool", "uint8")

    def _even_bags(self, op: Op) -> str | None:
        """The offsets of bags that each have all words of one row (of ids [b w]: 0, w, 2w ...); None for other bags."""
        listed = [op.args[1], argument(op, 6, "per_sample_weights") or op.args[1]]
        words, offsets = [each.op for each in listed if isinstance(each, Ref)], argument(op, 2, "offsets")
        counting = self._graph.by_name[offsets.op] if isinstance(offsets, Ref) else op
        start, _, step = counting.args if counting.operator == "arange" and len(counting.args) == 3 else (None, None, None)
        if len(words) != 2 or start != 0 or not isinstance(step, int):
            return None
        if argument(op, 3, "scale_grad_by_freq", False) or argument(op, 7, "include_last_offset", False):
            return None
        dims = {self._ops[name].outputs[0] for name in words}
        sizes = [self._graph.by_name[name].outputs[0].shape_at(ROWS) for name in (words[0], counting.name)]
        if len(dims) > 1 or sizes[0] != (sizes[1][0] * step,):
            return None
        factors = dims.pop()[0]
        return counting.name if factors[:1] and factors[0] in self._rows and self._rows.isdisjoint(axes_of(factors[1:])) else None


def combination(roles: Iterable[Role]) -> str:
    """How an op combines rows, by what it does with each axis of these; "" if it does not, or meets rows twice: parts lack the pairs."""
    found = [role.combine if role.kind == "contracted" else "" for role in roles]
    return found[0] if len(found) == 1 else ""


_CANNOT_TELL = ", cannot tell"
_LOOKUPS = (READS, MAKES, Role("contracted", "lookup"))


def _selects(op: Op) -> bool:
    return entry_of_call(op.target).rows == "selected"


Extreme = Literal["greatest", "least"]

_EXTREMES: dict[str, Extreme] = {"any": "greatest", "max": "greatest", "all": "least", "min": "least"}
_OPPOSITE: dict[Extreme, Extreme] = {"greatest": "least", "least": "greatest"}
_MOVES: tuple[Rows, ...] = ("same", "moved")


def decided_by_parts(graph: ModelGraph, condition: str, combined: Callable[[str], str]) -> set[str]:
    """The ops from rows to a condition; none if parts of a batch cannot decide it.

    Args:
        graph: the model.
        condition: an op.
        combined: how an op combines samples to something without rows; "" if it does not.
    """
    written = {name for op in graph.ops for name in written_storages(graph, op)}
    varying = _varying(graph)
    chain: set[str] = set()
    wanted: Extreme | None = None
    op = graph.by_name[condition]
    while graph.storage[op.name] not in written:
        chain.add(op.name)
        how = _EXTREMES.get(combined(op.name))
        if how is not None:
            return chain if wanted in (None, how) else set()
        source = next((graph.by_name[name] for name in op.inputs if name in varying), None)
        if source is None or not _is_of_one(op, source, varying):
            return set()
        does = entry_of_call(op.target).rows
        if does in ("greatest", "least"):
            if wanted not in (None, does):
                return set()
            wanted = does
        elif does in ("falling", "negated"):
            wanted = None if wanted is None else _OPPOSITE[wanted]
        elif does not in ("rising", "bounded", "added", "subtracted", *_MOVES):
            return set()
        op = source
    return set()


def _varying(graph: ModelGraph) -> set[str]:
    """The ops whose values may differ between parts of a batch."""
    found: set[str] = set()
    for op in graph.ops:
        own = op.kind == "input" and (not op.outputs or op.outputs[0].has_rows)
        if own or not found.isdisjoint(op.inputs):
            found.add(op.name)
    return found


def _is_of_one(op: Op, source: Op, varying: Collection[str]) -> bool:
    """Whether an op compares or moves one varying value, its first; a number cast to bool loses its order."""
    is_first = bool(op.args) and op.args[0] == Ref(source.name) and sum(name in varying for name in op.inputs) == 1
    moves = entry_of_call(op.target).rows in _MOVES
    is_truth = moves and op.outputs[0].dtype == "bool" != source.outputs[0].dtype
    return is_first and not is_truth and (not op.kwargs or moves)
