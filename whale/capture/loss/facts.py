"""What the loss rules ask of a graph: which nodes depend on the batch, need a gradient, or mix the rows of the batch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from fractions import Fraction

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from whale.capture.flat.aliasing import memory_roots, written_arguments
from whale.capture.flat.sizes import READS_ROWS

RowFactors = Callable[[Node], tuple[int, ...] | None]

aten = torch.ops.aten
_DETACH = (aten.detach.default, aten.detach_.default)
_SHAPE_ONLY = frozenset(
    (aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.rand_like, aten.randn_like)
    + (aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full)
)  # these read the shape and type of a tensor, not its values, and numbers


class BatchFacts:
    """Facts of every node of a graph, found in one walk in execution order.

    Args:
        graph: every node has ``meta["val"]``.
        rows: the placeholder that holds the number of rows; None where that is baked into the graph.
        row_factors: per dimension of a node's tensor, f > 0 if its size is f x rows, 0 if constant, else -1.
    """

    def __init__(self, graph: Graph, rows: Node | None, row_factors: RowFactors) -> None:
        self._rows = rows
        self._factors = row_factors
        self._dependent: set[Node] = set()
        self._differentiable: set[Node] = set()
        self._mixed: dict[Node, Node] = {}
        self._roots = memory_roots(graph)
        self._written = {self._roots[argument] for node in graph.nodes for argument in written_arguments(node)}
        self.num_rows = _example_rows(graph, rows, row_factors)
        self._writer: dict[Node, Node] = {}
        for node in graph.nodes:
            self._visit(node)
            self._writer |= {self._roots[base]: node for base in written_arguments(node)}

    def depends(self, node: object) -> bool:
        """Whether a value differs between pieces of a batch: it reads rows of the batch, or their number."""
        return isinstance(node, Node) and node in self._dependent

    def needs_gradient(self, node: Node) -> bool:
        """Whether a gradient flows into a node."""
        return node in self._differentiable

    def is_written(self, node: Node) -> bool:
        """Whether some op writes in place to the memory of a value."""
        return self._roots[node] in self._written

    @property
    def has_symbolic_rows(self) -> bool:
        """Whether the number of rows can be told from a constant."""
        return self._rows is not None

    def mixed(self, nodes: Iterable[object]) -> Node | None:
        """The op, if any, because of which one row of these nodes depends on other rows of the batch.

        Found by shape: a reduction over the rows that is used again, or rows against rows. Ops that keep the
        shape (batch normalisation in training, a cumulative sum) are not found here.
        """
        return next((self._mixed[node] for node in nodes if isinstance(node, Node) and node in self._mixed), None)

    def row_dims(self, node: object) -> tuple[int, ...] | None:
        """Dimensions in proportion to the rows; None if some size depends on them in another way, or for no tensor."""
        factors = self._factors(node) if isinstance(node, Node) else None
        if factors is None or -1 in factors:
            return None
        return tuple(dim for dim, factor in enumerate(factors) if factor > 0)

    def has_rows(self, node: object) -> bool:
        """Whether exactly one dimension is in proportion to the rows, and the others are constant."""
        dims = self.row_dims(node)
        return dims is not None and len(dims) == 1

    def proportion(self, count: object) -> Fraction | None:
        """k, if an integer is k x rows; None if it is not known to be.

        A plain number is one that was counted in a tensor with rows. In a capture for one number of rows, a node is a multiple of
        them where it has been written so, because a capture for other rows agrees.
        """
        value = value_of(count)
        if isinstance(value, torch.SymInt):
            rows = None if self._rows is None else self._rows.meta["val"]
            ratio = (value.node.expr / rows.node.expr).cancel() if isinstance(rows, torch.SymInt) else None
            return None if ratio is None or not ratio.is_Rational else Fraction(int(ratio.p), int(ratio.q))
        if isinstance(count, Node):
            return None if self._rows is None else _multiple(count, self._rows)
        return Fraction(value, self.num_rows) if isinstance(value, int) else None

    def follows_rows(self, number: Node) -> bool:
        """Whether a number is what it is because of the number of rows alone, and can be computed from any."""
        value, rows = value_of(number), None if self._rows is None else self._rows.meta["val"]
        if isinstance(rows, torch.SymInt) and isinstance(value, (torch.SymInt, torch.SymFloat)):
            return bool(value.node.expr.free_symbols <= rows.node.expr.free_symbols)
        return self.proportion(number) is not None

    def _visit(self, node: Node) -> None:
        factors = self._factors(node)
        has_rows = factors is not None and any(factors)
        sources = self._read(node)
        if getattr(node.target, "overloadpacket", None) in _SHAPE_ONLY:
            sources = [source for source in sources if tensor_of(source) is None]
        if READS_ROWS in node.meta or node is self._rows or has_rows or any(source in self._dependent for source in sources):
            self._dependent.add(node)
        if _is_floating(node) and self._gets_gradient(node):
            self._differentiable.add(node)
        if node in self._dependent and node.op == "call_function":
            self._find_mixing(node)

    def _gets_gradient(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return bool(getattr(node.meta.get("val"), "requires_grad", False))
        if node.target in _DETACH or (str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False):
            return False
        return any(source in self._differentiable for source in self._read(node))

    def _read(self, node: Node) -> list[Node]:
        """What a node reads: its arguments, and the last write so far to the memory of each."""
        writers = (self._writer.get(self._roots[source]) for source in node.all_input_nodes)
        return [*node.all_input_nodes, *(writer for writer in writers if writer is not None)]

    def _find_mixing(self, node: Node) -> None:
        for source in self._read(node):
            if source in self._mixed:
                self._mixed[node] = self._mixed[source]
                return
        if not _is_floating(node):
            return
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        suspects = [node, *(source for source in node.all_input_nodes if is_pointwise)]
        for suspect in suspects:
            if self._crosses_rows(suspect):
                self._mixed[node] = suspect
                return

    def _crosses_rows(self, node: Node) -> bool:
        """Whether a value that depends on the batch is not one value, or row of values, per row."""
        if node not in self._dependent:
            return False
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
        factors = self._factors(node) or ()
        if any(factor < 0 for factor in factors):
            return not free_unbacked_symbols(value)
        return sum(factor > 0 for factor in factors) != 1


def value_of(argument: object) -> object:
    """What an argument stands for in the trace: itself, or the example value of its node."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def functional_name(node: Node) -> str:
    """The op's name without its overload, an in-place op's as that of its functional twin: ``aten.add``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return f"aten.{node.target.overloadpacket.__name__.rstrip('_')}"


def tensor_of(node: Node) -> torch.Tensor | None:
    """The example tensor of a node, if it makes one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_scalar(node: object) -> bool:
    """Whether a node makes a tensor of one element, whatever the batch."""
    value = value_of(node)
    return isinstance(node, Node) and isinstance(value, torch.Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def constant_of(argument: object) -> float | None:
    """The number that an argument is in every trace; None for tensors and for what depends on the rows."""
    value = value_of(argument)
    if isinstance(argument, Node) and READS_ROWS in argument.meta:
        return None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex()) for item in values)


def _multiple(number: Node, rows: Node) -> Fraction | None:
    """k for a node that is `rows`, or ``rows x k``."""
    if number is rows:
        return Fraction(1)
    factor = number.args[1] if number.target is operator.mul and number.args[0] is rows else None
    return Fraction(factor) if isinstance(factor, int) else None


def _example_rows(graph: Graph, rows: Node | None, row_factors: RowFactors) -> int:
    if rows is not None:
        value = rows.meta["val"]
        return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)
    for node in graph.nodes:
        for dim, factor in enumerate(row_factors(node) or ()):
            if factor > 0:
                return int(node.meta["val"].shape[dim]) // factor
    return 1
