"""Small functions as flat graphs with a number of rows, the way that capture hands them to the loss rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from whale.capture.loss.terms import TermNodes, split_loss

aten = torch.ops.aten


class Wrapped(torch.nn.Module):
    """A function of parameters, frozen tensors and a batch as a module."""

    def __init__(self, function: Callable[..., object], parameters: Sequence[torch.Tensor], frozen: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(value.clone()) for value in parameters])
        for index, value in enumerate(frozen):
            self.register_buffer(f"frozen{index}", value)
        self.num_frozen = len(frozen)

    def forward(self, *batch: torch.Tensor) -> object:
        frozen = [getattr(self, f"frozen{index}") for index in range(self.num_frozen)]
        return self.function([*self.weights, *frozen], *batch)


@dataclass
class Split:
    """A loss in terms, and the graph that computes them from a piece of the batch."""

    terms: list[TermNodes]
    module: GraphModule
    model: Wrapped
    dynamic: bool

    def pieces(self, batch: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """The loss of the batch, computed in pieces of these row counts."""
        totals: list[torch.Tensor | float] = [0.0] * len(self.terms)
        weights: list[torch.Tensor | float] = [0.0] * len(self.terms)
        start = 0
        for size in sizes:
            piece = [value[start : start + size] for value in batch]
            values = list(self.module(*([size] if self.dynamic else []), *piece))
            for index, term in enumerate(self.terms):
                totals[index] = totals[index] + values.pop(0)
                weights[index] = 1.0 if term.weight is None else weights[index] + values.pop(0)
            start += size
        whole = list(self.module(start, *batch)) if self.dynamic else []
        for index, term in enumerate(self.terms if whole else ()):
            whole.pop(0)
            value = 1.0 if term.weight is None else whole.pop(0)
            weights[index] = weights[index] if isinstance(value, torch.Tensor) else value  # a number follows from all rows
        return sum(_term(term, total, weight) for term, total, weight in zip(self.terms, totals, weights, strict=True))  # type: ignore[return-value]


def _term(term: TermNodes, total: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor:
    divisor = torch.as_tensor(weight + term.offset, dtype=torch.float64)
    if term.minimum is not None:
        divisor = divisor.clamp(min=term.minimum)
    return term.coefficient * torch.as_tensor(total) / divisor


def split(
    function: Callable[..., object],
    parameters: Sequence[torch.Tensor],
    batch: Sequence[torch.Tensor],
    *,
    frozen: Sequence[torch.Tensor] = (),
    dynamic: bool = True,
) -> Split:
    """Exports a loss function and splits it."""
    model = Wrapped(function, parameters, frozen)
    rows = torch.export.Dim("rows", min=2)
    shapes = (tuple({0: rows} for _ in batch),) if dynamic else None
    exported = torch.export.export(model, tuple(batch), dynamic_shapes=shapes, strict=False)
    module = exported.module(check_guards=False)
    graph = module.graph
    graph.set_codegen(CodeGen())
    number = _rows_placeholder(module, batch[0].shape[0]) if dynamic else None
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    loss, weight = returned if len(returned) == 2 else (returned[0], None)
    terms = split_loss(graph, loss, weight, rows=number, row_factors=_factors(number, batch[0].shape[0]))
    values = [node for term in terms for node in (term.sum, term.weight) if node is not None]
    next(node for node in graph.nodes if node.op == "output").args = (tuple(values),)
    graph.eliminate_dead_code()
    graph.lint()
    return Split(terms, GraphModule(module, graph), model, dynamic)


def _rows_placeholder(module: GraphModule, num_rows: int) -> Node:
    """Makes the number of rows the first input, in place of every size of the batch."""
    graph = module.graph
    first = next(node for node in graph.nodes if node.op == "placeholder")
    symbol = first.meta["val"].shape[0]
    with graph.inserting_before(first):
        number = graph.placeholder("num_rows")
    number.meta["val"] = symbol
    for node in list(graph.nodes):
        if node.target is aten.sym_size.int and str(node.meta["val"]) == str(symbol):
            node.replace_all_uses_with(number)
            graph.erase_node(node)
    return number


def _factors(number: Node | None, num_rows: int) -> Callable[[Node], tuple[int, ...] | None]:
    def factor(size: int | torch.SymInt) -> int:
        if number is None:
            return size // num_rows if size % num_rows == 0 else 0
        if isinstance(size, int):
            return 0
        ratio = size.node.expr / number.meta["val"].node.expr
        return int(ratio) if ratio.is_number else -1

    def factors(node: Node) -> tuple[int, ...] | None:
        value = node.meta.get("val")
        return tuple(factor(size) for size in value.shape) if isinstance(value, torch.Tensor) else None

    return factors
