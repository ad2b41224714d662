"""What the loss rules ask of a graph: which nodes depend on the batch, need a gradient, and how they combine over rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from whale.axes.mixing import combination
from whale.axes.operators import Operator, Rows, entry_of_call
from whale.axes.over_rows import PER_ROW, Combining, Kind, operands_of
from whale.capture.flat.aliasing import DETACH, may_have_gradient, memory_roots, takes_shape, written_arguments
from whale.capture.flat.ops import target_name, what_rows_meet
from whale.capture.flat.sizes import READS_ROWS, dtype_name, hint_of, tensors_of
from whale.ir.graph import TensorSpec

RowFactors = Callable[[Node], tuple[int, ...] | None]


class BatchFacts:
    """Facts of every node of a graph, found in one walk in execution order.

    Args:
        graph: every node has ``meta["val"]``.
        rows: the placeholder that holds the number of rows; None in a capture for one number of rows.
        row_factors: per dimension of a node's tensor, f > 0 if its size is f x rows, 0 if constant, else -1.
    """

    def __init__(self, graph: Graph, rows: Node | None, row_factors: RowFactors) -> None:
        self._rows = rows
        self._factors = row_factors
        self._dependent: set[Node] = set()
        self._differentiable: set[Node] = set()
        self._kinds: dict[Node, Kind] = {}
        self._masks: dict[object, Node] = {}  # per size that depends on values, the mask that selects so many elements
        self._of_batch: set[Node] = set()  # made of the batch alone, without parameters and random numbers
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
        return node in self._differentiable

    def is_written(self, node: Node) -> bool:
        """Whether an op writes in place to the memory of a value."""
        return self._roots[node] in self._written

    @property
    def has_symbolic_rows(self) -> bool:
        return self._rows is not None

    def row_dims(self, node: object) -> tuple[int, ...] | None:
        """Dimensions of rows, all or selected ones; None if some size depends on them in another way, or for no tensor."""
        factors = self._factors(node) if isinstance(node, Node) else None
        value = tensor_of(node) if isinstance(node, Node) else None
        if factors is None or value is None:
            return None
        sizes = value.shape
        dims = tuple(dim for dim, factor in enumerate(factors) if factor > 0 or (factor < 0 and self.selected(sizes[dim]) is not None))
        return dims if all(factor >= 0 or dim in dims for dim, factor in enumerate(factors)) else None

    def selected(self, count: object) -> tuple[Node, int] | None:
        """The mask, and k, if an integer is known to be k x the number of elements that it selects."""
        value = value_of(count)
        if not isinstance(value, torch.SymInt) or not self._masks:
            return None
        expression = value.node.shape_env.simplify(value.node.expr)
        symbol = next((each for each in expression.free_symbols if each in self._masks), None)
        per_element = None if symbol is None else (expression / symbol).cancel()
        return None if per_element is None or not per_element.is_Integer else (self._masks[symbol], int(per_element))

    def is_known_before(self, mask: Node) -> bool:
        """Whether a value can be computed from the batch, before the model runs."""
        return mask in self._of_batch

    def has_rows(self, node: object) -> bool:
        """Whether one dimension is of rows, all or selected ones, and the others are constant."""
        dims = self.row_dims(node)
        return dims is not None and len(dims) == 1

    def proportion(self, count: object) -> Fraction | None:
        """k, if an integer is known to be k x rows.

        A plain number is the size of a tensor with rows. In a capture for one number of rows, a node is a multiple of them if `write_rows`
        wrote it so, because a capture for other rows agrees.
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
        """Whether a number can be computed from the number of rows alone."""
        value, rows = value_of(number), None if self._rows is None else self._rows.meta["val"]
        if isinstance(rows, torch.SymInt) and isinstance(value, (torch.SymInt, torch.SymFloat)):
            return bool(value.node.expr.free_symbols <= rows.node.expr.free_symbols)
        return self.proportion(number) is not None

    def are_per_row(self, nodes: Iterable[Node]) -> bool:
        """Whether values are one, or a slice of them, per row, or the same for any rows."""
        return all(self.over_rows(node) in PER_ROW for node in nodes)

    def over_rows(self, value: object) -> Kind:
        """How a value combines over rows. Unknown for memory that is written, unless it has rows.

        Whether one row depends on others is not asked: `whale.axes.mixing` says that of the graph.
        """
        if not isinstance(value, Node):
            return "constant"
        if value not in self._kinds:
            self._kinds[value] = self._over_rows(value)
        return self._kinds[value]

    def _over_rows(self, node: Node) -> Kind:
        entry = entry_of_node(node)
        if not self.depends(node) and not self.is_written(node):
            return "zero" if entry.rows == "zeros" else "constant"
        if tensor_of(node) is None:
            return "count" if self.proportion(node) else "other"
        if self.row_dims(node) != ():
            return "rows" if self.has_rows(node) else "other"
        if self.is_written(node) or node.kwargs.get("rounding_mode") is not None:
            return "other"
        operands, options = operands_of(entry, node.args, node.kwargs, lambda each: isinstance(each, Node) and tensor_of(each) is not None)
        call = Combining(
            entry,
            [self.over_rows(each) for each in operands],
            [self._spec(each).shape if isinstance(each, Node) and tensor_of(each) is not None else None for each in operands],
            [self.over_rows(each) for each in options],
            accumulates=any(each is True for each in node.args[3:4]) or node.kwargs.get("accumulate") is True,
            rounds=rounds(node),
            may_be_rows=self._rows is None and any(constant_of(each) is not None for each in operands[:2]),
        )
        if call.reads_rows and not call.adds_rows:
            how = self.combination(node)
            is_counted = not any(-1 in (self._factors(each) or ()) for each in node.all_input_nodes)  # not of what a mask selects
            call = replace(call, over_rows=how if how != "mean" or is_counted else "")
        made = tensor_of(node)
        assert made is not None
        found = call.kind or "other"
        if made.dtype == torch.bool and found != "constant":
            return "other"
        return "sum" if found == "count" else found  # of a tensor

    def combination(self, node: Node) -> str:
        """How an op combines rows to something that has none, by its rule; "" if it does not."""
        specs = {each: self._spec(each) for each in (node, *node.all_input_nodes) if tensor_of(each) is not None}
        if node not in specs or any(each not in specs and tensors_of(each) for each in node.all_input_nodes):
            return ""  # one of them has several tensors
        return combination(what_rows_meet(node, specs))

    def _spec(self, node: Node) -> TensorSpec:
        """The tensor of a node, with what a mask selects as rows."""
        value, factors = node.meta["val"], self._factors(node) or ()
        selected = (
            (self.selected(size) or (None, -1))[1] if factor < 0 else factor for size, factor in zip(value.shape, factors, strict=True)
        )
        return TensorSpec(tuple(map(hint_of, value.shape)), dtype_name(value.dtype), tuple(selected))

    def _visit(self, node: Node) -> None:
        factors = self._factors(node)
        has_rows = factors is not None and any(factors)
        sources = self._read(node)
        if takes_shape(node):
            sources = [source for source in sources if tensor_of(source) is None]
        if READS_ROWS in node.meta or node is self._rows or has_rows or any(source in self._dependent for source in sources):
            self._dependent.add(node)
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        is_made = node.op == "call_function" and not is_drawn and self._of_batch.issuperset(self._read(node))
        if is_made or (node.op == "placeholder" and node in self._dependent):
            self._of_batch.add(node)
        if node in self._dependent and (mask := _mask_of(node)) is not None and not self.is_written(mask):
            for size in (size for tensor in tensors_of(node) for size in tensor.shape):
                self._masks |= dict.fromkeys(free_unbacked_symbols(size), mask)
        if may_have_gradient(node) and self._gets_gradient(node):
            self._differentiable.add(node)

    def _gets_gradient(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return bool(getattr(node.meta.get("val"), "requires_grad", False))
        if node.target in DETACH or takes_shape(node) or (str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False):
            return False
        return any(source in self._differentiable for source in self._read(node))

    def _read(self, node: Node) -> list[Node]:
        """What a node reads: its arguments, and the last write so far to the memory of each."""
        writers = (self._writer.get(self._roots[source]) for source in node.all_input_nodes)
        return [*node.all_input_nodes, *(writer for writer in writers if writer is not None)]


def _mask_of(node: Node) -> Node | None:
    """What selects the elements that an op returns, or the positions of; None for any other op."""
    entry = entry_of_node(node)
    if entry.rows == "selected":
        return node.args[0]  # type: ignore[return-value]
    if not entry.looks_up or entry.indexed != "per dimension":
        return None
    found = [item for item in node.args[1] if isinstance(item, Node)]  # type: ignore[union-attr]
    return found[0] if len(found) == 1 and found[0].meta["val"].dtype == torch.bool else None


def value_of(argument: object) -> object:
    """The example value of a node; any other argument itself."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def entry_of_node(node: Node) -> Operator:
    """What is known of the operator that a node calls; nothing for sources."""
    return entry_of_call(target_name(node.target) if node.op == "call_function" else "")


def rows_of(node: Node) -> Rows | None:
    """What the op of a node makes of values that are combined over rows."""
    return entry_of_node(node).rows


def tensor_of(node: Node) -> torch.Tensor | None:
    """The example tensor of a node that makes one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_scalar(node: object) -> bool:
    """Whether a node makes a tensor of one element, whatever the batch."""
    value = value_of(node)
    return isinstance(node, Node) and isinstance(value, torch.Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def constant_of(argument: object) -> float | None:
    """The number that an argument is in every trace; None for tensors and what depends on the rows."""
    value = value_of(argument)
    if isinstance(argument, Node) and READS_ROWS in argument.meta:
        return None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


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


def rounds(node: Node) -> bool:
    """Whether an op makes integers of floats, or truths of numbers: of sums and means these are none."""
    source = next(iter(node.all_input_nodes), None)
    before, after = None if source is None else tensor_of(source), tensor_of(node)
    if before is None or after is None:
        return False
    return (before.is_floating_point() and not after.is_floating_point()) or (after.dtype == torch.bool and before.dtype != torch.bool)
