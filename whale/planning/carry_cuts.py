"""The cuts of a plan for another capture of the model: axes are the same where they are the same part of a parameter.

Axes take their names from what the graph does with them, so one axis may have another name where the loss is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from whale.axes import Axes
from whale.axes.labels import label
from whale.axes.values import Concatenation, Dimension
from whale.errors import PlanError
from whale.estimate.memory_writes import MemoryWrites
from whale.ir.graph import ModelGraph, Op
from whale.ir.layout import BATCH
from whale.ir.plan import Cut


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


def carry_cuts(cuts: tuple[Cut, ...], names: Mapping[str, str], graph: ModelGraph, axes: Axes, ops: Sequence[str]) -> tuple[Cut, ...]:
    """Cuts for the ops of another capture: sizes and the parts in which parameters are held stay, ops are labelled anew.

    Args:
        cuts: of a stage in the first capture.
        names: per axis there, its name here.
        graph: the other capture.
        axes: its axes.
        ops: of the stage, in graph order.

    Raises:
        PlanError: an axis along which parameters are held has no counterpart.
    """
    found: dict[str, Cut] = {}
    lost = []
    for cut in cuts:
        if cut.axis == BATCH:  # rows arrive whole there
            continue
        like = axes.by_name.get(names.get(cut.axis, ""))
        if like is not None and like.size == sum(cut.sizes):
            found[like.name] = Cut(like.name, cut.sizes, whole_parameters=cut.whole_parameters)
        elif _holds(cut, names, axes):
            lost.append(cut.axis)
    if lost:
        raise PlanError(
            f"an axis that is cut in training is one in {graph.mode} too ({', '.join(lost)}: not found there)",
            hint="the model computes something else there; insist on another axis with whale.split(axis=...)",
        )
    work = _Labelling(graph, axes, ops, tuple(found.values())).work()
    return tuple(_restated(cut, work, axes, ops) for cut in found.values())


def _holds(cut: Cut, names: Mapping[str, str], axes: Axes) -> bool:
    """Whether parameters are held in parts along an axis; one without a counterpart here may be in any."""
    holders = axes.held_by.get(names.get(cut.axis, ""))
    return holders is None or any(holder.rpartition(":")[0] not in cut.whole_parameters for holder in holders)


def _restated(cut: Cut, work: Mapping[str, str], axes: Axes, ops: Sequence[str]) -> Cut:
    meeting = (name for name in ops if name in axes.ops and cut.axis in axes.ops[name].roles)
    return replace(cut, whole_in=tuple(name for name in meeting if work.get(name) != cut.axis))


class _Labelling:
    """Goes through the ops in order: each works along the axis in which its parameter lies, else its first operand."""

    def __init__(self, graph: ModelGraph, axes: Axes, ops: Sequence[str], cuts: tuple[Cut, ...]) -> None:
        self._graph, self._axes, self._ops = graph, axes, ops
        self._sources = label(graph, axes, ops, cuts)
        self._writes = MemoryWrites(graph, ops)
        self._cut = [cut.axis for cut in cuts]
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
            axis = self._choose(op, work) if self._writes.owner[name] not in whole else None
            if axis is not None:
                work[name] = axis
            for operand in op.inputs:
                if op.target == "operator.getitem" or not self._writes.need_same(operand, name):
                    continue
                lies = self._held(operand, work)
                if lies != (axis if axis in self._sources.axes_in(operand) else None) and self._writes.owner[operand] not in whole:
                    return work, self._writes.owner[operand]
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
