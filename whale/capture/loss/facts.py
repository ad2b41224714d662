"""What the loss rules ask of a graph: which nodes depend on the batch, need a gradient, mix rows, or grow with them.

x [b d] -> sum(0) [d] -> mean []       a sum: the values of pieces add up to that of the batch
x [b d] -> mean(0) [d] -> sum []       a mean: add up weighted by rows
x [b d] -> sum(0) [d] -> square        neither
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from whale.axes.operators import Operator, Rows, entry_of_call
from whale.axes.operators.entry import CONSTANT, LINEAR, Kind, combined, operands_of
from whale.capture.flat.aliasing import DETACH, may_have_gradient, memory_roots, takes_shape, written_arguments
from whale.capture.flat.ops import target_name
from whale.capture.flat.sizes import READS_ROWS, tensors_of

RowFactors = Callable[[Node], tuple[int, ...] | None]

aten = torch.ops.aten


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
        self._mixed: dict[Node, Node] = {}
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

    def mixed(self, nodes: Iterable[object]) -> Node | None:
        """The op, if any, because of which a row of these nodes depends on other rows of the batch.

        Found by shape: a reduction over the rows that is used again, or rows against rows. Ops that keep the shape (batch normalisation
        in training, a cumulative sum) are not found.
        """
        return next((self._mixed[node] for node in nodes if isinstance(node, Node) and node in self._mixed), None)

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

    def over_rows(self, value: object) -> Kind:
        """How a value combines over rows. Unknown for memory that is written."""
        if not isinstance(value, Node) or not (self.depends(value) or self.is_written(value)):
            return "constant"
        if value not in self._kinds:
            self._kinds[value] = "other" if self.is_written(value) else self._over_rows(value)
        return self._kinds[value]

    def _over_rows(self, node: Node) -> Kind:
        if tensor_of(node) is None:
            return "count" if self.proportion(node) else "other"
        if self.row_dims(node) != ():
            return "rows" if self.has_rows(node) and self.mixed([node]) is None else "other"
        entry = entry_of_node(node)
        if entry.rows is None or node.kwargs.get("rounding_mode") is not None or (entry.rows in LINEAR and rounds(node)):
            return "other"
        operands, options = operands_of(entry, node.args, node.kwargs)
        tensors = [operand for operand in operands if isinstance(operand, Node) and tensor_of(operand) is not None]
        if entry.rows == "filled":  # with a number, in the shape of a tensor
            operands, tensors = [operand for operand in operands if operand not in tensors], []
        kinds = [self.over_rows(operand) for operand in operands]
        if not CONSTANT.issuperset(map(self.over_rows, options)):
            return "other"
        if "rows" in kinds:
            return self._of_rows(node, entry.rows, tensors)
        may_be_rows = self._rows is None and any(constant_of(operand) is not None for operand in operands[:2])
        found = combined(entry, kinds, may_be_rows=may_be_rows) or "other"
        made = tensor_of(node)
        if made is not None and made.dtype == torch.bool and found != "constant":
            return "other"
        return "sum" if found == "count" else found  # of a tensor

    def _of_rows(self, node: Node, how: Rows | None, operands: Sequence[Node]) -> Kind:
        """What an op without rows makes of operands that have some."""
        if any(self.over_rows(operand) != "rows" for operand in operands):
            return "other"
        if how == "mean":
            value = tensor_of(operands[0])
            return "other" if value is None or self.proportion(value.numel()) is None else "mean"  # else its rows are chosen
        return "sum" if how in ("sum", "counted") or (how == "product" and self._meet(node, operands)) else "other"

    def _meet(self, node: Node, operands: Sequence[Node]) -> bool:
        """Whether a product sums over the rows of its operands together, which leaves no other way unless it is an equation."""
        equation = node.args[0]
        if not isinstance(equation, str):
            return True
        terms = equation.replace(" ", "").partition("->")[0].split(",")
        if "." in equation or len(terms) != len(operands):
            return False
        letters = {term[dim] for term, operand in zip(terms, operands, strict=True) for dim in self.row_dims(operand) or ()}
        return len(letters) == 1

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
        if node in self._dependent and node.op == "call_function":
            self._find_mixing(node)

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

    def _find_mixing(self, node: Node) -> None:
        for source in self._read(node):
            if source in self._mixed:
                self._mixed[node] = self._mixed[source]
                return
        if not may_have_gradient(node):
            return
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        suspects = [node, *(source for source in node.all_input_nodes if is_pointwise)]
        for suspect in suspects:
            if self._crosses_rows(suspect):
                self._mixed[node] = suspect
                return

    def _crosses_rows(self, node: Node) -> bool:
        """Whether a value that depends on the batch is not one value, or slice of values, per row."""
        if node not in self._dependent:
            return False
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
        factors = self._factors(node) or ()
        if any(factor < 0 for factor in factors):
            return not free_unbacked_symbols(value)
        return sum(factor > 0 for factor in factors) != 1


def _mask_of(node: Node) -> Node | None:
    """What selects the elements that an op returns, or the positions of; None for any other op."""
    if rows_of(node) == "selected":
        return node.args[0]  # type: ignore[return-value]
    if node.target is not aten.index.Tensor:
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
