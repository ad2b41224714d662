"""Cuts of a stage from what its ops do, and from the cuts of another stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale.axes import Axes
from whale.ir.division import divide
from whale.ir.plan import BATCH, Shard
from whale.planning.shard.classes import WHOLE, Classes


@dataclass(frozen=True)
class OpAxes:
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


def op_axes(classes: Classes, labels: Sequence[int]) -> OpAxes:
    """What ops do at some labels of their classes.

    Args:
        labels: per class, the index of its label.
    """
    found, graph, kind_of = OpAxes(), classes.scene.graph, classes.space.kind_of
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
    found, scene = op_axes(classes, labels), classes.scene
    cuts = with_work((Shard(axis, ()) for axis in classes.space.axes if axis in found.axes), found, scene.axes, scene.ops)
    rows = tuple(sorted(scene.rows_arriving)), tuple(sorted(scene.rows_leaving))
    return tuple(replace(cut, arriving=rows[0], handed_on=rows[1]) if cut.axis == BATCH else cut for cut in cuts)


def with_work(shards: Iterable[Shard], found: OpAxes, axes: Axes, ops: Collection[str]) -> tuple[Shard, ...]:
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
