"""Labels of classes written down as the cuts of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.ir.plan import BATCH, Shard
from whale.planning.shard.classes import WHOLE, Classes


def write_shards(classes: Classes, labels: Sequence[int]) -> tuple[Shard, ...]:
    """The cuts of a stage whose classes have these labels, in the model's order of axes; their sizes are left open.

    Args:
        labels: per class, the index of its label.
    """
    uses = _uses(classes, labels)
    working, held, scattered = uses
    scene = classes.scene
    found = []
    for axis in _names(classes, uses):
        meeting = (op.name for op in scene.members[axis])
        holders = dict.fromkeys(holder.rpartition(":")[0] for holder in scene.axes.held_by[axis])
        found.append(
            Shard(
                axis,
                sizes=(),
                whole_in=tuple(name for name in meeting if working.get(name) != axis),
                whole_parameters=tuple(name for name in holders if name in held and held[name] != axis),
                scattered=tuple(name for name in scene.ops if scattered.get(name) == axis),
                arriving=tuple(sorted(scene.rows_arriving)) if axis == BATCH else (),
                handed_on=tuple(sorted(scene.rows_leaving)) if axis == BATCH else (),
            )
        )
    return tuple(found)


def names_of(classes: Classes, labels: Sequence[int]) -> tuple[str, ...]:
    """The axes that some labels make use of, in the model's order."""
    return _names(classes, _uses(classes, labels))


Uses = tuple[dict[str, str], dict[str, str | None], dict[str, str]]


def _names(classes: Classes, uses: Uses) -> tuple[str, ...]:
    used = {axis for each in uses for axis in each.values() if axis is not None}
    return tuple(axis for axis in classes.space.axes if axis in used)


def _uses(classes: Classes, labels: Sequence[int]) -> Uses:
    """Per op the axis along which it works, per parameter along which it is held, per op along which its sum is scattered."""
    working: dict[str, str] = {}
    held: dict[str, str | None] = {}
    scattered: dict[str, str] = {}
    graph = classes.scene.graph
    for name, number in classes.node_of.items():
        label, op = classes.nodes[number].labels[labels[number]], graph.by_name[name]
        axis = classes.work(name, label)
        if op.kind in ("parameter", "buffer"):
            known = graph.parameter_by_name.get(op.target)
            if known is not None:
                held[known.name] = axis
        elif axis is not None:
            working[name] = axis
            if label.scattered != WHOLE:
                scattered[name] = next(_axes_of_kind(classes, name, label.scattered))
    return working, held, scattered


def _axes_of_kind(classes: Classes, name: str, kind: int) -> Iterator[str]:
    return (axis for axis in classes.scene.axes_in(name) if classes.space.kind_of.get(axis) == kind)
