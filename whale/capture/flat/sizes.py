"""How sizes in a captured graph depend on the number of rows; the model's parameters and buffers with their sizes and ties.

Sizes are torch's symbolic expressions, or two captures compared. One tensor under several names is one parameter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx, nn

from whale.errors import CaptureError
from whale.ir.graph import Parameter, TensorSpec

_FACTORS = "whale.row_factors"
READS_ROWS = "whale.reads_rows"  # marks a node whose number depends on the rows, but is no symbol


class RowSizes:
    """Reads sizes, given the symbol of the rows; without a symbol, from factors on the nodes (`mark_factors`)."""

    def __init__(self, symbol: Any, rows: int) -> None:
        self.rows = rows
        self._symbol = sympy.Symbol("rows") if symbol is None else symbol
        self._linear: dict[Any, tuple[int, int] | None] = {}
        self._bounds: dict[Any, int] = {}

    def linear(self, size: object) -> tuple[int, int] | None:
        """(a, b) for a size of a x rows + b; None for any other."""
        if isinstance(size, int):
            return (0, size)
        if not isinstance(size, torch.SymInt):
            return None
        expression = size.node.expr
        if expression not in self._linear:
            self._linear[expression] = self._as_linear(size.node.shape_env.simplify(expression))
        return self._linear[expression]

    def reads_rows(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return READS_ROWS in node.meta or (
            isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and self._symbol in value.node.expr.free_symbols
        )

    def spec(self, tensor: Tensor, node: fx.Node, position: int = 0) -> TensorSpec:
        marked = node.meta.get(_FACTORS)
        factors = tuple(map(self._factor, tensor.shape)) if marked is None else marked[position]
        shape = tuple(self._at_example(size, node) for size in tensor.shape)
        return TensorSpec(shape, dtype_name(tensor.dtype), factors)

    def factors(self, node: fx.Node) -> tuple[int, ...] | None:
        value = node.meta.get("val")
        return self.spec(value, node).row_factors if isinstance(value, Tensor) else None

    def _factor(self, size: object) -> int:
        linear = self.linear(size)
        if linear is None:
            return -1
        factor, constant = linear
        return factor if factor >= 0 and (factor == 0 or constant == 0) else -1

    def _as_linear(self, expression: Any) -> tuple[int, int] | None:
        expression = expression.expand()
        factor = expression.coeff(self._symbol, 1)
        constant = expression - factor * self._symbol
        return (int(factor), int(constant)) if factor.is_Integer and constant.is_Integer else None

    def _at_example(self, size: int | torch.SymInt, node: fx.Node) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.shape_env.simplify(size.node.expr).subs(self._symbol, self.rows)
        return int(expression.subs({symbol: self._bound(symbol, node) for symbol in expression.free_symbols}))

    def _bound(self, symbol: Any, node: fx.Node) -> int:
        """A size that depends on values is estimated as the elements of the mask that its op reads, or of its smallest tensor."""
        if symbol not in self._bounds:
            if node.target is operator.getitem:
                node = node.all_input_nodes[0]
            tensors = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
            masks = [value for value in tensors if value.dtype == torch.bool]
            counts = [math.prod(self._at_example(size, node) for size in value.shape) for value in masks or tensors]
            self._bounds[symbol] = min(counts, default=1)
        return self._bounds[symbol]


def mark_factors(graph: fx.Graph, double: fx.Graph | None, rows: int) -> None:
    """Writes row factors on the nodes of a graph of fixed rows, and on those of one of twice as many, by comparison.

    If the two graphs are not equal op by op, nothing is known but the inputs: every factor is -1.
    """
    same_ops = double is not None and have_same_ops(graph, double)
    nodes = list(graph.nodes)
    others = list(double.nodes) if double is not None and same_ops else []
    for index, node in enumerate(nodes):
        shapes = _shapes(node)
        doubled = _shapes(others[index]) if same_ops else []
        if node.op == "placeholder" and not same_ops:
            doubled = [tuple(2 * size if node.meta.get("whale.has_rows") and d == 0 else size for d, size in enumerate(s)) for s in shapes]
        known = [len(s) for s in shapes] == [len(s) for s in doubled]
        pairs = zip(shapes, doubled, strict=True) if known else ((shape, (-1,) * len(shape)) for shape in shapes)
        node.meta[_FACTORS] = [tuple(_compared(a, b, rows) for a, b in zip(*pair, strict=True)) for pair in pairs]
        if same_ops:
            others[index].meta[_FACTORS] = node.meta[_FACTORS]


def have_same_ops(graph: fx.Graph, other: fx.Graph) -> bool:
    """Whether two graphs call the same ops in the same order."""
    return [(node.op, node.target) for node in graph.nodes] == [(node.op, node.target) for node in other.nodes]


def tensors_of(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in values if isinstance(item, Tensor)]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _shapes(node: fx.Node) -> list[tuple[Any, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(node)]


def _compared(size: object, doubled: object, rows: int) -> int:
    if not isinstance(size, int) or not isinstance(doubled, int):
        return -1
    if size == doubled:
        return 0
    return size // rows if doubled == 2 * size and size % rows == 0 else -1


def hint_of(size: Any) -> Any:
    """A size at the example's rows; one that depends on values in tensors counts as 1."""
    if not isinstance(size, torch.SymInt):
        return size
    return 1 if size.node.hint is None else size.node.hint


@dataclass(frozen=True)
class TiedTensors:
    parameters: tuple[Parameter, ...]  # in the order of their first names in ``state_dict``
    tensors: dict[str, Tensor]  # the user's tensors by canonical name
    canonical: dict[str, str]  # canonical name of every name


def holdings(model: nn.Module) -> TiedTensors:
    """Finds a model's parameters and buffers; ties by object identity."""
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Literal["parameter", "buffer"]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = [(name, tensor, "parameter") for name, tensor in module._parameters.items()]
        held += [(name, tensor, "buffer") for name, tensor in module._buffers.items()]
        for name, tensor, kind in held:
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            names.setdefault(id(tensor), []).append(full)
            tensors[full] = tensor
            kinds[full] = "parameter" if kind == "parameter" else "buffer"
    found = [_describe(same, tensors[same[0]], kinds[same[0]]) for same in names.values()]
    canonical = {name: same[0] for same in names.values() for name in same}
    return TiedTensors(tuple(found), {parameter.name: tensors[parameter.name] for parameter in found}, canonical)


def check_memory(held: TiedTensors, changed: Collection[str]) -> None:
    """Checks that trained or written tensors (`changed`) share memory as one parameter or not at all: a rank holds each in its own."""
    by_storage: dict[int, list[Parameter]] = {}
    for parameter in held.parameters:
        by_storage.setdefault(_extent(held.tensors[parameter.name])[0], []).append(parameter)
    for parameters in by_storage.values():
        for one, other in combinations(parameters, 2):
            if (one.name in changed or other.name in changed) and _share_memory(held.tensors[one.name], held.tensors[other.name]):
                raise CaptureError(
                    f"{one.name} and {other.name} share memory, but are not one tensor",
                    hint=f"assign the {one.kind} itself ({other.name} = {one.name}), which ties them, or clone() one of them",
                )


def lender(held: TiedTensors, tensor: Tensor, changed: Collection[str]) -> str | None:
    """The changed parameter or buffer that shares memory with a tensor; None if none does."""
    return next((each.name for each in held.parameters if each.name in changed and _share_memory(held.tensors[each.name], tensor)), None)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes between the first and last element of two tensors overlap."""
    (storage, start, stop), (other_storage, other_start, other_stop) = _extent(one), _extent(other)
    return storage == other_storage and start < other_stop and other_start < stop


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """The storage, which meta tensors have too, and the bytes in it."""
    if tensor.numel() == 0:
        return 0, 0, 0
    size, last = tensor.element_size(), sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return tensor.untyped_storage()._cdata, int(first * size), int((first + last + 1) * size)


def _describe(names: list[str], tensor: Tensor, kind: Literal["parameter", "buffer"]) -> Parameter:
    spec = TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), (0,) * tensor.dim())
    trainable = kind == "parameter" and tensor.requires_grad
    return Parameter(names[0], spec, kind, trainable, tuple(names[1:]))
