"""The cuts of a plan for another capture of the model: axes are the same where they are the same part of a parameter.

Axes take their names from what the graph does with them, so one axis may have another name where the loss is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from whale.axes import Axes
from whale.axes.labels import label
from whale.axes.values import Concatenation, Dimension
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import BATCH, Shard, Stage
from whale.ir.writes import MemoryWrites
from whale.planning.shard.write import OpAxes, carried, with_work
from whale.sharding.parameters import ParameterShardings, Pattern


def same_axes(ours: Axes, theirs: Axes) -> dict[str, str]:
    """Per axis of one capture its name in the other: by the parameters that have it, else by name and size."""
    names: dict[str, str] = {}
    for parameter, dimensions in ours.parameters.items():
        for own, other in zip(dimensions, theirs.parameters.get(parameter, ()), strict=False):
            for axis, name in _pairs(own, other):
                names.setdefault(axis, name)
    for known in ours.axes:
        like = theirs.by_name.get(known.name)
        if like is not None and like.size == known.size:
            names.setdefault(known.name, known.name)
    return names


def _pairs(own: Dimension, other: Dimension) -> Iterator[tuple[str, str]]:
    if len(own) != len(other):
        return
    for a, b in zip(own, other, strict=True):
        if isinstance(a, str) and isinstance(b, str):
            yield a, b
        elif isinstance(a, Concatenation) and isinstance(b, Concatenation) and len(a.pieces) == len(b.pieces):
            for piece, partner in zip(a.pieces, b.pieces, strict=True):
                yield from _pairs(piece, partner)


def retarget_shards(
    stage: Stage, ours: Axes, names: Mapping[str, str], graph: ModelGraph, axes: Axes, ops: Sequence[str], lent: Sequence[str] = ()
) -> tuple[Shard, ...]:
    """Cuts for the ops of another capture: axes that are found again are cut, parameters lie as they do, ops are labelled anew.

    Args:
        stage: in the first capture.
        ours: the axes of that.
        names: per axis there, its name here.
        graph: the other capture.
        axes: its axes.
        ops: of the stage, in graph order.
        lent: parameters that its ops read and it does not hold; they are brought to it whole.
    """
    cuts = carried((shard for shard in stage.shards if shard.axis != BATCH), names, axes)  # rows arrive whole there
    shards = as_held(stage, ours, tuple(Shard(cut.axis, cut.sizes) for cut in cuts), axes, lent)
    return with_work(shards, OpAxes(work=_Labelling(graph, axes, ops, shards).work()), axes, ops)


def as_held(stage: Stage, ours: Axes, shards: tuple[Shard, ...], axes: Axes, lent: Sequence[str] = ()) -> tuple[Shard, ...]:
    """Cuts along which only those parameters lie in parts that a stage holds in the very same ones; its program has the others whole.

    What devices hold, and what they sum, is the training's, whatever is captured beside it: where a parameter is held in other parts,
    or in parts of an axis that is none here, the program brings it together; where it is held whole, each device works on its part.

    Args:
        stage: in the first capture.
        ours: the axes of that.
        shards: cuts of the other.
        axes: of the other.
        lent: more parameters, which are whole there.
    """
    held, known = (ParameterShardings((), each, ()) for each in (ours, axes))
    own = Pattern(stage.parameters, stage.split, stage.shards)

    def lies_so(name: str, shard: Shard) -> bool:
        parts = known.parts(Pattern((name,), stage.split, (replace(shard, whole_parameters=()),)), name)
        return name not in lent and parts is not None and parts == held.parts(own, name)

    names = (*stage.parameters, *lent)
    having = {shard.axis: [name for name in names if shard.axis in axes.in_parameters.get(name, ())] for shard in shards}
    return tuple(
        replace(shard, whole_parameters=tuple(name for name in having[shard.axis] if not lies_so(name, shard))) for shard in shards
    )


class _Labelling:
    """Goes through the ops in order: each works along the axis in which its parameter lies, else its first operand."""

    def __init__(self, graph: ModelGraph, axes: Axes, ops: Sequence[str], shards: tuple[Shard, ...]) -> None:
        self._graph, self._axes, self._ops = graph, axes, ops
        self._sources = label(graph, axes, ops, shards)
        self._writes = MemoryWrites(graph, ops)
        self._cut = [shard.axis for shard in shards]
        self._anywhere = [axis for axis in self._cut if self._all_may(axis)]

    def work(self) -> dict[str, str]:
        """Per op that works on parts, the axis. Memory that is written in place and would lie in two ways stays whole."""
        whole: set[str] = set()
        while True:
            work, clash = self._go_through(whole)
            if clash is None:
                return work
            whole.add(clash)

    def _go_through(self, whole: Collection[str]) -> tuple[dict[str, str], str | None]:
        work: dict[str, str] = {}
        for name in self._ops:
            op = self._graph.by_name[name]
            axis = self._choose(op, work) if self._graph.storage[name] not in whole else None
            if axis is not None:
                work[name] = axis
            for operand in op.inputs:
                if op.target == "operator.getitem" or not self._writes.need_same(operand, name):
                    continue
                lies = self._held(operand, work)
                if lies != (axis if axis in self._sources.axes_in(operand) else None) and self._graph.storage[operand] not in whole:
                    return work, self._graph.storage[operand]
        return work, None

    def _choose(self, op: Op, work: Mapping[str, str]) -> str | None:
        if op.name not in self._axes.ops:
            return None
        roles = self._axes.ops[op.name].roles
        may = [axis for axis in self._cut if axis in roles and roles[axis].kind != "whole"]
        if op.target == "operator.getitem":
            return next((axis for axis in may if axis == work.get(op.inputs[0])), None)
        sources = sorted(op.inputs, key=lambda name: self._graph.by_name[name].kind == "call")
        lying = [self._held(name, work) for name in sources]
        return next((axis for axis in (*lying, *self._anywhere) if axis in may), None)

    def _held(self, name: str, work: Mapping[str, str]) -> str | None:
        """The axis along which a tensor lies in parts."""
        if self._graph.by_name[name].kind != "call":
            return self._sources.held(name)
        axis = work.get(name)
        return axis if axis in self._sources.axes_in(name) else None

    def _all_may(self, axis: str) -> bool:
        met = (self._axes.ops[name].roles.get(axis) for name in self._ops if name in self._axes.ops)
        return all(role is None or role.kind != "whole" for role in met)
