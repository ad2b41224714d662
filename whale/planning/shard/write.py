"""The cuts of a stage from what its ops do, and from the cuts of an equivalent stage.

Stages that are equal up to the names of their ops, axes and parameters are cut equally and cost the same. Names are numbered
in the order in which the stage meets them, so that twelve equal layers read like the twelve before them:

    %2 <- linear(%0, p1) float32[b, 64] [batch 0] ...
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale.axes import Axes
from whale.axes.values import Concatenation, Dimension
from whale.estimate.prices.prices import Prices
from whale.ir.division import divide
from whale.ir.graph import Argument, Op, Ref
from whale.ir.plan import BATCH, Shard
from whale.planning.shard.classes import WHOLE, Classes
from whale.planning.shard.space import Scene


@dataclass(frozen=True)
class OpCuts:
    """What the ops of a stage do."""

    work: dict[str, str] = field(default_factory=dict)  # per op that works on parts, its axis
    scattered: dict[str, str] = field(default_factory=dict)  # per op whose sum is scattered, its axis
    held: dict[str, str | None] = field(default_factory=dict)  # per known parameter, the axis along which it is held; None for whole

    @property
    def axes(self) -> frozenset[str]:
        """All axes in use."""
        return frozenset(axis for each in (self.work, self.scattered, self.held) for axis in each.values() if axis is not None)


def op_cuts(classes: Classes, labels: Sequence[int]) -> OpCuts:
    """What ops do under some labels of their classes; `labels`: per class, the index of its label."""
    found, graph, kind_of = OpCuts(), classes.scene.graph, classes.space.kind_of
    for name, number in classes.node_of.items():
        label, op = classes.nodes[number].labels[labels[number]], graph.by_name[name]
        axis = classes.work(name, label)
        if op.kind in ("parameter", "buffer"):
            known = graph.parameter_by_name.get(op.target)
            if known is not None:
                found.held[known.name] = axis
        elif axis is not None:
            found.work[name] = axis
            if label.scattered != WHOLE:
                found.scattered[name] = next(other for other in classes.scene.axes_in(name) if kind_of.get(other) == label.scattered)
    return found


def cuts_of(classes: Classes, labels: Sequence[int]) -> tuple[Shard, ...]:
    """The cuts of a stage under some labels, in the model's order of axes; without sizes."""
    key = tuple(labels)
    if key not in classes.cuts:
        found, scene = op_cuts(classes, labels), classes.scene
        axes = found.axes
        cuts = with_work((Shard(axis, ()) for axis in classes.space.axes if axis in axes), found, scene.axes, scene.ops)
        rows = tuple(sorted(scene.rows_arriving)), tuple(sorted(scene.rows_leaving))
        classes.cuts[key] = tuple(replace(cut, arriving=rows[0], handed_on=rows[1]) if cut.axis == BATCH else cut for cut in cuts)
    return classes.cuts[key]


def with_work(shards: Iterable[Shard], found: OpCuts, axes: Axes, ops: Collection[str]) -> tuple[Shard, ...]:
    """Shards along which the ops of a stage (in graph order) do what `found` says; unknown parameters stay as they are."""
    meeting: dict[str, list[str]] = {}
    for name in ops:
        for axis in axes.ops[name].roles if name in axes.ops else ():
            meeting.setdefault(axis, []).append(name)
    return tuple(
        replace(
            shard,
            whole_in=tuple(name for name in meeting.get(shard.axis, ()) if found.work.get(name) != shard.axis),
            scattered=tuple(name for name in ops if found.scattered.get(name) == shard.axis),
            whole_parameters=tuple(
                name
                for name in dict.fromkeys((*shard.whole_parameters, *(holder.rpartition(":")[0] for holder in axes.held_by[shard.axis])))
                if (found.held[name] != shard.axis if name in found.held else name in shard.whole_parameters)
            ),
        )
        for shard in shards
    )


@dataclass(frozen=True)
class Names:
    """Names of ops, axes and parameters in an equivalent stage; missing ones are equal."""

    ops: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, shard: Shard) -> Shard:
        def ops(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(self.ops.get(name, name) for name in names)

        return Shard(
            self.axes.get(shard.axis, shard.axis),
            shard.sizes,
            ops(shard.whole_in),
            tuple(self.parameters.get(name, name) for name in shard.whole_parameters),
            ops(shard.scattered),
            ops(shard.arriving),
            ops(shard.handed_on),
        )


def carried(shards: Iterable[Shard], names: Mapping[str, str], axes: Axes) -> tuple[Shard, ...]:
    """Cuts of one capture in another; an axis of another length is divided in the same proportions.

    `names`: per axis its name there. Axes that do not exist there, or are shorter than the number of devices, are left out.
    """
    found: dict[str, Shard] = {}
    for shard in shards:
        axis = names.get(shard.axis)
        size = axes.by_name[axis].size if axis in axes.by_name else 0
        if shard.axis == BATCH:
            found[BATCH] = shard
        elif axis is not None and size >= len(shard.sizes):
            sizes = shard.sizes if sum(shard.sizes) == size else divide(size, shard.sizes, minimum=1)
            found.setdefault(axis, replace(Names(axes=names).renamed(shard), sizes=sizes))
    return tuple(found.values())


def with_unread(shards: Sequence[Shard], parameters: Iterable[str], axes: Axes) -> tuple[Shard, ...]:
    """Adds cuts of parameters that the stage holds and only outputs read, not ops of the training.

    Such a parameter is held in parts like what the loss reads: along a dimension as long as a cut axis, in the same sizes, since
    activations of that length may lie in those parts; else a matrix along its first dimension, in the proportions of the longest
    cut.
    """
    by_size = {sum(shard.sizes): shard.sizes for shard in reversed(shards) if shard.axis != BATCH}
    longest = by_size[max(by_size)] if by_size else ()
    found = list(shards)
    for name in parameters if longest else ():
        own = {axis: axes.by_name[axis].size for dimension in axes.parameters[name] for axis in dimension if isinstance(axis, str)}
        axis = next((axis for axis in own if own[axis] in by_size), next(iter(own)) if len(own) > 1 else None)
        if axis is not None and own[axis] >= len(longest):
            found.append(Shard(axis, by_size.setdefault(own[axis], divide(own[axis], longest, minimum=1))))
    return tuple(found)


@dataclass(frozen=True)
class Outline:
    """A stage up to names."""

    signature: Hashable  # all that choosing and pricing the cuts of a stage read of it, without names
    ops: tuple[str, ...]  # in the order of their numbers in the signature
    axes: tuple[str, ...]  # in the same order
    parameters: tuple[str, ...]  # in the same order

    def names_in(self, other: Outline) -> Names:
        """The names of this stage in another of the same signature."""
        pairs = zip((self.ops, self.axes, self.parameters), (other.ops, other.axes, other.parameters), strict=True)
        return Names(*(dict(zip(own, theirs, strict=True)) for own, theirs in pairs))


def outline_of(scene: Scene, prices: Prices) -> Outline:
    numbers = _Numbering(scene, prices)
    signature = tuple(numbers.lines())
    return Outline(signature, tuple(numbers.ops), tuple(numbers.axes), tuple(numbers.parameters))


class _Numbers(dict[str, int]):
    """Numbers names in the order in which they are first asked for."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


class _Numbering:
    def __init__(self, scene: Scene, prices: Prices) -> None:
        self._scene, self._prices, self._graph = scene, prices, scene.graph
        self.ops, self.axes, self.parameters, self._storages = _Numbers(), _Numbers(), _Numbers(), _Numbers()

    def lines(self) -> Iterator[Hashable]:
        """One per op of the stage, and per value that it reads; last the axes in the model's order, with their sizes."""
        for name in self._scene.ops:
            op = self._graph.by_name[name]
            for operand in op.inputs:
                if operand not in self.ops:
                    yield self._source(self._graph.by_name[operand])
            yield self._of(op), self._argument(op.args), tuple((key, self._argument(value)) for key, value in op.kwargs)
        met = (axis for axis in self._scene.axes.axes if axis.name in self.axes or axis.name == BATCH)
        yield tuple((self._axis(axis.name), axis.size) for axis in met)

    def _source(self, op: Op) -> Hashable:
        """A value that the stage reads from outside: a parameter, an input, or another stage's result."""
        known = self._graph.parameter_by_name.get(op.target) if op.kind in ("parameter", "buffer") else None
        if known is not None:
            return self._of(op), self.parameters[known.name], known.trainable, known.name in self._scene.shared
        return self._of(op), tuple((read.outputs, self._lies(read)) for read in map(self._graph.by_name.__getitem__, op.inputs))

    def _of(self, op: Op) -> Hashable:
        """What an op is and does."""
        scene, name, kept = self._scene, op.name, self._prices.kept
        places = (scene.received, scene.handed_on, scene.returned, scene.rows_arriving, scene.rows_leaving)
        marks = tuple(name in place for place in (*places, self._prices.activations, scene.axes.positions, kept))
        storages = tuple(self._storages[each] for each in (self._graph.storage[name], *kept.get(name, ())))
        target = op.target if op.kind == "call" else op.kind
        figures = op.forward_flops, op.backward_flops, op.requires_grad, op.tags
        return self.ops[name], target, op.outputs, self._lies(op), figures, marks, storages

    def _lies(self, op: Op) -> Hashable:
        """The dimensions of its results, and what it does with each axis."""
        known = self._scene.axes.ops.get(op.name)
        if known is None:
            return None
        made = tuple(tuple(map(self._dimension, dimensions)) for dimensions in known.outputs)
        return made, tuple((self._axis(axis), role) for axis, role in known.roles.items())

    def _dimension(self, dimension: Dimension) -> Hashable:
        return tuple(
            tuple(map(self._dimension, factor.pieces)) if isinstance(factor, Concatenation) else self._axis(factor) for factor in dimension
        )

    def _axis(self, name: str) -> Hashable:
        return BATCH if name == BATCH else self.axes[name]

    def _argument(self, argument: Argument) -> Hashable:
        if isinstance(argument, Ref):
            return self.ops[argument.op]
        return tuple(map(self._argument, argument)) if isinstance(argument, tuple) else repr(argument)
