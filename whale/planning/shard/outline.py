"""A stage up to the names of its ops, axes and parameters: stages of one outline are cut alike, and cost the same.

Everything is numbered in the order in which the stage meets it, so that twelve equal layers in the middle of a model read
like the twelve before them:

    %2 <- linear(%0, p1) float32[b, 64] [batch 0] ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from whale.axes import Dimension
from whale.axes.values import Concatenation, Factor
from whale.estimate.prices.prices import Prices
from whale.ir.graph import Argument, Op, Ref
from whale.ir.plan import BATCH
from whale.planning.shard.space import Scene


def outline_of(scene: Scene, prices: Prices) -> str:
    """The outline: all that choosing and pricing the cuts of a stage read of it, but for names.

    Args:
        scene: the stage.
        prices: of the graph.
    """
    return "\n".join(_Outline(scene, prices).lines())


class _Numbers(dict[str, int]):
    """Numbers names in the order in which they are first asked for."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


class _Outline:
    def __init__(self, scene: Scene, prices: Prices) -> None:
        self._scene, self._prices, self._graph = scene, prices, scene.graph
        self._ops, self._axes, self._parameters, self._storages = _Numbers(), _Numbers(), _Numbers(), _Numbers()

    def lines(self) -> Iterator[str]:
        """One per op of the stage, and per value that it reads; in the end the axes in the model's order, with their sizes."""
        for name in self._scene.ops:
            op = self._graph.by_name[name]
            for operand in op.inputs:
                if operand not in self._ops:
                    yield self._source(self._graph.by_name[operand])
            arguments = ", ".join((*map(self._argument, op.args), *(f"{key}={self._argument(value)}" for key, value in op.kwargs)))
            yield f"{self._of(op)} ({arguments})"
        met = (axis for axis in self._scene.axes.axes if axis.name in self._axes or axis.name == BATCH)
        yield " ".join(f"{self._axis(axis.name)}:{axis.size}" for axis in met)

    def _source(self, op: Op) -> str:
        """A value that the stage reads from outside: a parameter, an input, or what another stage made from other values."""
        known = self._graph.parameter_by_name.get(op.target) if op.kind in ("parameter", "buffer") else None
        if known is not None:
            held = f"{known.trainable} {known.name in self._scene.shared}"
            return f"{self._of(op)} {self._parameters[known.name]} {held}"
        read = (self._graph.by_name[name] for name in op.inputs)
        return f"{self._of(op)} from {' '.join(f'{self._specs(each)} {self._lies(each)}' for each in read)}"

    def _of(self, op: Op) -> str:
        """What an op is and does."""
        scene, name = self._scene, op.name
        target = op.target if op.kind == "call" else op.kind
        places = (scene.received, scene.handed_on, scene.returned, scene.rows_arriving, scene.rows_leaving, self._prices.activations)
        marks = "".join("01"[name in place] for place in (*places, scene.axes.positions, self._prices.kept))
        kept = " ".join(str(self._storages[each]) for each in self._prices.kept.get(name, ()))
        return (
            f"{self._ops[name]} {self._storages[self._graph.storage[name]]} {target} {self._specs(op)} {self._lies(op)} "
            f"{op.forward_flops} {op.backward_flops} {op.requires_grad} {sorted(op.tags)} {marks} keeps {kept}"
        )

    @staticmethod
    def _specs(op: Op) -> str:
        return " ".join(map(str, op.outputs))

    def _lies(self, op: Op) -> str:
        """The dimensions of its results, and what it does with each axis."""
        known = self._scene.axes.ops.get(op.name)
        if known is None:
            return "-"
        made = " ".join(self._dimensions(dimensions) for dimensions in known.outputs)
        return f"{made} {', '.join(f'{self._axis(axis)} {role}' for axis, role in known.roles.items())}"

    def _dimensions(self, dimensions: Sequence[Dimension]) -> str:
        return "[" + " ".join(self._product(dimension) for dimension in dimensions) + "]"

    def _product(self, factors: Iterable[Factor]) -> str:
        return "*".join(self._factor(factor) for factor in factors) or "1"

    def _factor(self, factor: Factor) -> str:
        if isinstance(factor, Concatenation):
            return "(" + "|".join(map(self._product, factor.pieces)) + ")"
        return self._axis(factor)

    def _axis(self, name: str) -> str:
        return BATCH if name == BATCH else str(self._axes[name])

    def _argument(self, argument: Argument) -> str:
        if isinstance(argument, Ref):
            return f"%{self._ops[argument.op]}"
        if isinstance(argument, tuple):
            return "(" + " ".join(map(self._argument, argument)) + ")"
        return repr(argument)
