"""The place of the rows in each tensor, by which the runtime cuts and sends; and whether a stage may compute its rows in halves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from whale.axes.operators import entry_of_call
from whale.axes.values import Axes, Concatenation, Factor, axes_of
from whale.ir.graph import ModelGraph, Op, storages
from whale.ir.plan import BATCH, BatchAxis, Edge, Shard, Stage


def batch_axes(graph: ModelGraph, axes: Axes) -> dict[str, BatchAxis]:
    """Per op with one result, the place of its batch: ``outer x rows x inner`` in one dimension.

    Ops whose result has no batch, has it twice, or inside a concatenation, are left out.
    """
    return {op.name: axis for op in graph.ops if (axis := batch_axis(op, axes)) is not None}


def batch_axis(op: Op, axes: Axes) -> BatchAxis | None:
    """`batch_axes` of one op; None if it is left out."""
    if op.name not in axes.ops or len(op.outputs) != 1:
        return None
    dimensions = axes.ops[op.name].outputs[0]
    places = [index for index, dimension in enumerate(dimensions) for axis in axes_of(dimension) if axis == BATCH]
    if len(places) != 1 or BATCH not in dimensions[places[0]]:
        return None
    dimension = dimensions[places[0]]
    at = dimension.index(BATCH)
    return BatchAxis(places[0], _extent(dimension[:at], axes), _extent(dimension[at + 1 :], axes))


def _extent(factors: tuple[Factor, ...], axes: Axes) -> int:
    return prod(_extent_of(factor, axes) for factor in factors)


def _extent_of(factor: Factor, axes: Axes) -> int:
    if isinstance(factor, Concatenation):
        return sum(_extent(piece, axes) for piece in factor.pieces)
    return axes.by_name[factor].size


MIN_ROWS = 2  # fewer cannot be halved


@dataclass(frozen=True)
class Halving:
    """A stage whose rows are computed in two halves; `faults` say why it cannot be, and then nothing else holds."""

    rows: frozenset[str]  # values that differ between the halves
    read: Mapping[str, BatchAxis]  # of the received tensors with rows, their places
    joined: Mapping[str, BatchAxis]  # of the tensors with rows that it hands on, their places
    added: frozenset[str]  # results that are a sum over rows
    faults: tuple[str, ...]


def halve_stage(model: ModelGraph, axes: Axes, edges: Iterable[Edge], stage: Stage) -> Halving:
    """Finds out how a stage may be computed in two halves, given the edges of its replica."""
    sent = [name for edge in edges if edge.source == stage.index for name in edge.tensors]
    terms = [name for term in model.loss for name in (term.sum, term.weight) if name is not None]
    own = set(stage.ops)
    return halve(model, axes, stage.ops, stage.shards, [*sent, *(name for name in (*terms, *model.outputs) if name in own)])


def halve(model: ModelGraph, axes: Axes, ops: Collection[str], shards: Sequence[Shard], handed_on: Iterable[str]) -> Halving:
    """Finds out how ops with cuts may be computed in two halves, given which results are handed on."""
    own = set(ops)
    stage = [op for op in model.ops if op.name in own and op.kind == "call"]
    given = {name: model.by_name[name] for op in stage for name in op.inputs if name not in own or model.by_name[name].kind != "call"}
    rows = _with_rows(stage, given.values())
    wanted = [name for name in dict.fromkeys(handed_on) if name in rows]
    terms = {name for term in model.loss for name in (term.sum, term.weight)}
    read = [name for name, op in given.items() if name in rows and op.outputs]
    joined = [name for name in wanted if name not in terms]
    places = {name: place for name in (*read, *joined) if (place := batch_axis(model.by_name[name], axes)) is not None}
    faults = [f"{mixing}" for mixing in axes.mixing if mixing.op in own]
    faults += [f"%{name} has no known place of its rows" for name in (*read, *joined) if name not in places]
    faults += [] if model.dynamic else ["its graph was captured for each number of rows by itself"]
    faults += _shard_faults(axes, shards, (*read, *joined), places)
    faults += _write_faults(model, stage, rows)
    faults += _sum_faults(model, axes, stage, rows)
    return Halving(
        rows,
        {name: places[name] for name in read if name in places},
        {name: places[name] for name in joined if name in places},
        frozenset(wanted) & terms,
        tuple(dict.fromkeys(faults)),
    )


def _with_rows(stage: Sequence[Op], given: Collection[Op]) -> frozenset[str]:
    """Values made from rows, or from their number."""
    found = {op.name for op in given if any(spec.has_rows for spec in op.outputs) or (op.kind == "input" and not op.outputs)}
    for op in stage:
        if any(name in found for name in op.inputs):
            found.add(op.name)
    return frozenset(found)


def _shard_faults(axes: Axes, shards: Sequence[Shard], names: Sequence[str], places: Mapping[str, BatchAxis]) -> list[str]:
    """Neither the rows may be cut, nor share a dimension with a cut axis in what is received or handed on."""
    faults = ["its rows are cut over the devices of each group"] if any(shard.axis == BATCH for shard in shards) else []
    for shard in shards:
        for name in names:
            if (
                name in places
                and name in (*shard.arriving, *shard.handed_on)
                and shard.axis in axes_of(axes.ops[name].outputs[0][places[name].dim])
            ):
                faults.append(f"%{name} has rows and parts of {shard.axis} in one dimension")
    return faults


def _write_faults(model: ModelGraph, stage: Sequence[Op], rows: Collection[str]) -> list[str]:
    """What both halves see must not be written: the second would see the first's writes."""
    own, roots = {op.name for op in stage}, storages(stage)
    faults = []
    for op in stage:
        root = roots[op.name]
        if "in_place" in op.tags and (root not in own or root not in rows):
            faults.append(f"%{op.name} writes in place what is not of one half alone")
    return faults


def _sum_faults(model: ModelGraph, axes: Axes, stage: Sequence[Op], rows: Collection[str]) -> list[str]:
    """Nothing whole may be added to a sum over the rows of a half: it would count twice."""
    sums = {op.name for op in stage if op.name in axes.ops and op.name in rows and _sums_rows(op, axes)}
    faults = []
    for op in stage:
        if op.outputs and any(name in sums for name in op.inputs) and BATCH not in axes.ops[op.name].roles:
            sums.add(op.name)
            others = [name for name in op.inputs if name not in rows and model.by_name[name].outputs]
            if others and entry_of_call(op.target).rows in _ADDING:
                faults.append(f"%{op.name} adds %{others[0]} to a sum over rows")
    return faults


_ADDING = ("added", "subtracted", "subtracted from", "interpolated", "joined")


def _sums_rows(op: Op, axes: Axes) -> bool:
    role = axes.ops[op.name].roles.get(BATCH)
    return role is not None and role.kind == "contracted"
