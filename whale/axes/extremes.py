"""Which conditions the parts of a batch tell for the whole: the greatest, or the least, of something of each row.

    x [b d] -> gt [b d] -> any []                 of the whole it is true where it is of some part
    x [b d] -> amax [] -> lt [] -> logical_not    the same
    x [b d] -> sum [] -> gt []                    parts cannot tell

So where all parts find a condition to be the same, it is that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from whale.ir.graph import ModelGraph, Op, Ref
from whale.ir.writes import written_storages

Extreme = Literal["greatest", "least"]

_EXTREMES: dict[str | None, Extreme] = {"any": "greatest", "max": "greatest", "all": "least", "min": "least"}
_OPPOSITE: dict[Extreme, Extreme] = {"greatest": "least", "least": "greatest"}
_REDUCTIONS: dict[str, Extreme] = {
    **dict.fromkeys(("any", "_is_any_true", "amax", "max"), "greatest"),
    **dict.fromkeys(("all", "_is_all_true", "amin", "min"), "least"),
}
_MOVES = frozenset(
    ["held", "to", "_to_copy", "clone", "detach", "alias", "view", "reshape", "flatten", "squeeze", "unsqueeze", "select", "slice"]
)
_RISING = _MOVES | {"gt", "ge", "greater", "greater_equal", "add", "sub"}
_FALLING = frozenset(("lt", "le", "less", "less_equal", "logical_not", "bitwise_not", "neg", "negative"))


def told_by_parts(graph: ModelGraph, condition: str, combined: Callable[[str], str | None]) -> set[str]:
    """The ops that lead from rows to a condition; none where the parts of a batch cannot tell it.

    Args:
        graph: the model.
        condition: an op.
        combined: how an op combines samples to something without rows; None where it does not.
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
        reduced = _REDUCTIONS.get(op.operator)
        if reduced is not None and wanted not in (None, reduced):
            return set()
        if reduced is not None:
            wanted = reduced
        elif op.operator in _FALLING:
            wanted = None if wanted is None else _OPPOSITE[wanted]
        elif op.operator not in _RISING:
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
    """Whether an op compares or moves one varying value, its first; a number taken for a truth is no longer in order."""
    is_first = bool(op.args) and op.args[0] == Ref(source.name) and sum(name in varying for name in op.inputs) == 1
    is_truth = op.operator in _MOVES and op.outputs[0].dtype == "bool" != source.outputs[0].dtype
    return is_first and not is_truth and (not op.kwargs or op.operator in _MOVES)
