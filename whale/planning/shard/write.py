"""Cuts of a stage from what its ops do, and from the cuts of another stage.

Stages that are equal up to the names of their ops, axes and parameters are cut in one way, and cost the same. Everything is numbered in the
order in which the stage meets it, so that twelve equal layers in the middle of a model read like the twelve before them:

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
    """What the ops of a stage do.

    Attributes:
        work: per op that works on parts, along which axis.
        scattered: per op whose sum is scattered, along which axis.
        held: per parameter, along which axis it is held; None for whole. Of others nothing is known.
    """

    work: dict[str, str] = field(default_factory=dict)
    scattered: dict[str, str] = field(default_factory=dict)
    held: dict[str, str | None] = field(default_factory=dict)

    @property
    def axes(self) -> frozenset[str]:
        """All that are made use of."""
        return frozenset(axis for each in (self.work, self.scattered, self.held) for axis in each.values() if axis is not None)


def op_cuts(classes: Classes, labels: Sequence[int]) -> OpCuts:
    """What ops do at some labels of their classes.

    Args:
        labels: per class, the index of its label.
    """
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
    """The cuts of a stage at some labels of its classes, in the model's order of axes; their sizes are left open."""
    found, scene = op_cuts(classes, labels), classes.scene
    cuts = with_work((Shard(axis, ()) for axis in classes.space.axes if axis in found.axes), found, scene.axes, scene.ops)
    rows = tuple(sorted(scene.rows_arriving)), tuple(sorted(scene.rows_leaving))
    return tuple(replace(cut, arriving=rows[0], handed_on=rows[1]) if cut.axis == BATCH else cut for cut in cuts)


def with_work(shards: Iterable[Shard], found: OpCuts, axes: Axes, ops: Collection[str]) -> tuple[Shard, ...]:
    """Shards along which the ops of a stage, in graph order, do what they do.

    Args:
        found: what they do; parameters of which nothing is known stay as they are.
        ops: of the stage.
    """
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
    """What ops, axes and parameters are called elsewhere; those that are not among them keep their names."""

    ops: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, shard: Shard) -> Shard:
        """A cut as it is called there."""

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
    """Cuts of a capture in another one; an axis that is longer or shorter there is divided in the same proportions.

    Args:
        shards: of a stage.
        names: per axis its name there.
        axes: there.

    Returns:
        Without those of axes that are none there, or shorter than there are devices.
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
    """The cuts of a stage, and those of parameters that it holds and no op of the training reads, but outputs do.

    Such a parameter is held in parts as what the loss reads is: along a dimension as long as an axis that is cut, in the same sizes,
    since activations of that length may lie in those parts; else a matrix is, along its first dimension, in the proportions of the
    longest cut.

    Args:
        shards: with sizes.
        parameters: that no op reads.
        axes: of the model; a dimension of these parameters is an axis of its own.
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
    """A stage up to names.

    Attributes:
        signature: all that choosing and pricing the cuts of a stage read of it, but for names.
        ops, axes, parameters: the names, in the order of their numbers in the signature.
    """

    signature: Hashable
    ops: tuple[str, ...]
    axes: tuple[str, ...]
    parameters: tuple[str, ...]

    def names_in(self, other: Outline) -> Names:
        """The names of this stage as they are in another of the same signature."""
        pairs = zip((self.ops, self.axes, self.parameters), (other.ops, other.axes, other.parameters), strict=True)
        return Names(*(dict(zip(own, theirs, strict=True)) for own, theirs in pairs))


def outline_of(scene: Scene, prices: Prices) -> Outline:
    """The outline of a stage.

    Args:
        scene: the stage.
        prices: of the graph.
    """
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
        """One per op of the stage, and per value that it reads; in the end the axes in the model's order, with their sizes."""
        for name in self._scene.ops:
            op = self._graph.by_name[name]
            for operand in op.inputs:
                if operand not in self.ops:
                    yield self._source(self._graph.by_name[operand])
            yield self._of(op), self._argument(op.args), tuple((key, self._argument(value)) for key, value in op.kwargs)
        met = (axis for axis in self._scene.axes.axes if axis.name in self.axes or axis.name == BATCH)
        yield tuple((self._axis(axis.name), axis.size) for axis in met)

    def _source(self, op: Op) -> Hashable:
        """A value that the stage reads from outside: a parameter, an input, or what another stage made from other values."""
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
