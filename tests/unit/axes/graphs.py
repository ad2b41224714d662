"""Builds small ModelGraphs by hand: ``b`` in a shape is the rows of the batch, ``6b`` six times as many, ``?6`` six at the example."""

from __future__ import annotations

from dataclasses import replace

from whale.ir.graph import Argument, LossTerm, ModelGraph, Op, Parameter, Ref, TensorSpec
from whale.ir.scope import SourceLine

ROWS = 4
Shape = tuple[int | str, ...]


def spec(shape: Shape, dtype: str = "float32") -> TensorSpec:
    """A tensor of this shape."""
    factors = tuple((-1 if size[0] == "?" else int(size[:-1] or 1)) if isinstance(size, str) else 0 for size in shape)
    sizes = (f * ROWS if f > 0 else int(str(size).lstrip("?")) for f, size in zip(factors, shape, strict=True))
    return TensorSpec(tuple(sizes), dtype, factors)


class Build:
    """A graph under construction; each method returns a reference to the new op."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.parameters: list[Parameter] = []
        self.loss: tuple[LossTerm, ...] = ()

    def input(self, name: str, *shape: int | str, dtype: str = "float32") -> Ref:
        return self._add(Op(name, "input", name, outputs=(spec(shape, dtype),)))

    def input_rows(self) -> Ref:
        """The number of rows, as an integer."""
        return self._add(Op("num_rows", "input", "num_rows", tags=frozenset({"reads_rows"})))

    def parameter(self, name: str, *shape: int | str, ties: tuple[str, ...] = ()) -> Ref:
        if not any(name in parameter.ties for parameter in self.parameters):
            self.parameters.append(Parameter(name, spec(shape), ties=ties))
        return self._add(Op("p_" + name.replace(".", "_"), "parameter", name, outputs=(spec(shape),)))

    def call(self, target: str, *args: Argument, out: Shape | list[Shape] = (), dtype: str = "float32", **kwargs: Argument) -> Ref:
        """A call of ``aten.<target>``, or of another library's op; `out` is the result's shape, a list for several."""
        full = target if target.startswith(("aten.", "operator.", "mine.")) else f"aten.{target}"
        shapes = out if isinstance(out, list) else [out]
        name = f"{full.split('.')[1]}_{len(self.ops)}"
        tags = frozenset({"pointwise"}) if full.split(".")[1] in POINTWISE else frozenset()
        op = Op(name, "call", full, args, tuple(kwargs.items()), tuple(spec(s, dtype) for s in shapes), tags=tags, module=self.module)
        return self._add(op)

    def items(self, source: Ref, *shapes: Shape) -> list[Ref]:
        """The results of an op that has several."""
        return [self.call("operator.getitem", source, index, out=shape) for index, shape in enumerate(shapes)]

    def loss_term(self, total: Ref, weight: Ref | None = None, reason: str = "") -> None:
        where = next(op.where for op in self.ops if op.name == total.op)
        self.loss += (LossTerm(1.0, total.op, None if weight is None else weight.op, where=where, reason=reason),)

    def graph(self) -> ModelGraph:
        return ModelGraph(tuple(self.ops), tuple(self.parameters), ROWS, self.loss)

    module = ""

    def _add(self, op: Op) -> Ref:
        line = SourceLine("model.py", len(self.ops) + 1)
        self.ops.append(replace(op, where=line))
        return Ref(op.name)


POINTWISE = ("add", "sub", "mul", "div", "relu", "gelu", "neg", "eq", "le", "rsqrt", "pow")
