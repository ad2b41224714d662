"""A stage up to the names of its ops, axes and parameters: stages of one outline are cut in one way, and cost the same.

Everything is numbered in the order in which the stage meets it, so that twelve equal layers in the middle of a model read
like the twelve before them:

    %2 <- linear(%0, p1) float32[b, 64] [batch 0] ...
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from whale.axes.values import Concatenation, Dimension
from whale.estimate.prices.prices import Prices
from whale.ir.graph import Argument, Op, Ref
from whale.ir.plan import BATCH
from whale.planning.shard.space import Scene
from whale.planning.shard.write import Names


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
