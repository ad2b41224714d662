"""Small graphs and clusters made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.graph import Argument, LossTerm, ModelGraph, Op, Parameter, Ref, TensorSpec
from whale.ir.scope import Scope, ScopePath, SourceLine

ROWS = 4


def scope(entry: int, count: int | None = 1, name: str | None = None, kind: str = "replicate", is_default: bool = False) -> Scope:
    """A scope entered at line ``entry + 1`` of ``model.py``."""
    assert kind in ("replicate", "split")
    return Scope(kind, count, name, None, SourceLine("model.py", entry + 1), entry, is_default)


class Graph:
    """Builds a ModelGraph op by op; every tensor has ROWS rows in front unless told otherwise."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.parameters: list[Parameter] = []
        self.loss: list[LossTerm] = []
        self.outputs: tuple[str, ...] = ()
        self.path: ScopePath = ()

    def rows(self) -> str:
        """The number of rows."""
        self.ops.append(Op("num_rows", "input", "num_rows", tags=frozenset({"reads_rows"})))
        return "num_rows"

    def input(self, name: str, width: int = 8, dtype: str = "float32") -> str:
        """A batch input of shape [rows, width]."""
        self.ops.append(Op(name, "input", name, outputs=(TensorSpec((ROWS, width), dtype, (1, 0)),)))
        return name

    def parameter(self, name: str, *shape: int, trainable: bool = True, kind: str = "parameter") -> str:
        """A parameter or buffer; its op is named ``p_NAME``."""
        spec = TensorSpec(shape, "float32", (0,) * len(shape))
        if all(parameter.name != name for parameter in self.parameters):
            self.parameters.append(Parameter(name, spec, kind, trainable))
            self.ops.append(Op(f"p_{name}", kind, name, outputs=(spec,), requires_grad=trainable))
        return f"p_{name}"

    def call(
        self,
        name: str,
        target: str,
        *args: Argument | str,
        width: int | None = 8,
        flops: int = 0,
        tags: Iterable[str] = (),
        grad: bool = True,
        spec: TensorSpec | None = None,
        outputs: tuple[TensorSpec, ...] | None = None,
    ) -> str:
        """A call; text arguments are the names of ops. Without a width it makes a scalar."""
        given = spec or (TensorSpec((), "float32", ()) if width is None else TensorSpec((ROWS, width), "float32", (1, 0)))
        self.ops.append(
            Op(
                name,
                "call",
                target,
                tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args),
                outputs=(given,) if outputs is None else outputs,
                scope=self.path,
                where=SourceLine("model.py", 100 + len(self.ops)),
                forward_flops=flops,
                backward_flops=2 * flops if grad else 0,
                tags=frozenset(tags),
                requires_grad=grad,
            )
        )
        return name

    def linear(self, name: str, source: str, parameter: str | None = None, width: int = 8) -> str:
        """A square linear layer."""
        weight = self.parameter(parameter or f"{name}.weight", width, width)
        return self.call(name, "aten.linear.default", source, weight, width=width, flops=2 * ROWS * width * width)

    def sum_loss(self, source: str, name: str = "loss", weight: str | None = None) -> None:
        """Ends in a sum of everything."""
        path, self.path = self.path, ()
        self.call(name, "aten.sum.default", source, width=None)
        self.path = path
        self.loss.append(LossTerm(1.0, name, weight))

    def build(self, **fields: object) -> ModelGraph:
        """The graph."""
        return ModelGraph(tuple(self.ops), tuple(self.parameters), ROWS, tuple(self.loss), self.outputs, **fields)


def chain(num_layers: int, scopes: Sequence[ScopePath] = (), width: int = 8) -> ModelGraph:
    """Linear layers in a row and a sum; layer i is under scopes[i], if there are so many."""
    graph = Graph()
    value = graph.input("x", width)
    for index in range(num_layers):
        graph.path = scopes[index] if index < len(scopes) else ()
        value = graph.linear(f"layer{index}", value, width=width)
    graph.path = ()
    graph.sum_loss(value)
    return graph.build()


def device(name: str, host: str, flops: float = 1e9, memory: int = 2**30, bandwidth: float = 1e12) -> Device:
    """A device; its speed in FLOP/s decides unless the bandwidth is low."""
    return Device(name, host, f"{flops:g}", (("float32", flops),), memory, bandwidth)


def cluster(*hosts: Sequence[float], memory: int = 2**30, name: str = "test") -> Cluster:
    """Hosts h0, h1, ... whose devices have these FLOP/s: ``cluster((2e9, 1e9), (1e9,))``."""
    made = tuple(
        Host(f"h{number}", tuple(device(f"h{number}/{i}", f"h{number}", flops, memory) for i, flops in enumerate(speeds)), Link(1e10, 1e-9))
        for number, speeds in enumerate(hosts)
    )
    return Cluster(name, made, Link(1e9, 1e-8))


def with_unread(graph: ModelGraph, scope: ScopePath = (), **shapes: tuple[int, ...]) -> ModelGraph:
    """The graph of a model that has more parameters, which only outputs read, of these shapes."""
    more = (Parameter(name, TensorSpec(shape, "float32", (0,) * len(shape)), scope=scope) for name, shape in shapes.items())
    return replace(graph, parameters=(*graph.parameters, *more))
