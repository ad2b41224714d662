"""How a value without rows grows with the batch: what linear ops make of a sum, or of a mean, over all rows.

x [b d] -> sum(0) [d] -> mean []       a sum: the values of pieces add up to that of the batch
x [b d] -> mean(0) [d] -> sum []       a mean: those of pieces, weighted by their rows, do
x [b d] -> sum(0) [d] -> square        neither
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.fx import Node

from whale.capture.loss.facts import BatchFacts, constant_of, functional_name, tensor_of

Growth = Literal["sum", "mean"] | None
"""None where it is neither, or cannot be told."""


def growth(value: object, facts: BatchFacts) -> Growth:
    """How a value grows; what does not depend on the batch is the mean of itself. What is written may do so from then on."""
    if isinstance(value, Node) and facts.is_written(value):
        return None
    if not facts.depends(value):
        return "mean"
    assert isinstance(value, Node)
    if tensor_of(value) is None:
        return "sum" if facts.proportion(value) else None
    if facts.row_dims(value) != ():
        return None
    rule = _RULES.get(functional_name(value))
    return None if rule is None else rule(value, facts)


def _reduced(how: Growth) -> Callable[[Node, BatchFacts], Growth]:
    def rule(node: Node, facts: BatchFacts) -> Growth:
        operand = node.args[0]
        return how if _has_plain_rows(operand, facts) else growth(operand, facts)

    return rule


def _product(node: Node, facts: BatchFacts) -> Growth:
    """A product of two tensors, of which rows meet rows and are summed, or one is constant."""
    if all(_has_plain_rows(operand, facts) for operand in node.args[:2]):
        return "sum"
    return _times(node, facts)


def _einsum(node: Node, facts: BatchFacts) -> Growth:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if "." in equation or not all(_has_plain_rows(operand, facts) for operand in operands):
        return None
    letters = {term[dim] for term, operand in zip(terms, operands, strict=True) for dim in facts.row_dims(operand) or ()}
    return "sum" if len(letters) == 1 else None


def _linear(node: Node, facts: BatchFacts) -> Growth:
    found = _times(node, facts)
    return found if found == "mean" or len(node.args) < 3 or node.args[2] is None else None


def _times(node: Node, facts: BatchFacts) -> Growth:
    """A product of which one factor is constant, or the number of rows."""
    left, right = node.args[0], node.args[1]
    if facts.depends(left) and facts.depends(right):
        share = facts.proportion(right) if _tensor(right) is None else None
        return "sum" if share and growth(left, facts) == "mean" else None
    constant, other = (right, left) if facts.depends(left) else (left, right)
    return growth(other, facts) if _is_no_count(constant, facts) else None


def _over(node: Node, facts: BatchFacts) -> Growth:
    """A quotient by a constant, or by the number of rows."""
    left, right = node.args[0], node.args[1]
    if node.kwargs.get("rounding_mode") is not None:
        return None
    if not facts.depends(right):
        return growth(left, facts) if _is_no_count(right, facts) else None
    share = facts.proportion(right) if _tensor(right) is None else None
    return "mean" if share and growth(left, facts) == "sum" and facts.depends(left) else None


def _sum_of_two(node: Node, facts: BatchFacts) -> Growth:
    left, right = growth(node.args[0], facts), growth(node.args[1], facts)
    return left if left == right and constant_of(node.kwargs.get("alpha", 1)) is not None else None


def _joined(node: Node, facts: BatchFacts) -> Growth:
    listed = node.args[0]
    found = {growth(item, facts) for item in listed} if isinstance(listed, (list, tuple)) else {None}
    return found.pop() if len(found) == 1 else None


def _filled(node: Node, facts: BatchFacts) -> Growth:
    """A tensor that holds a number of rows, as ``torch.tensor(x.shape[0])``."""
    return growth(next((source for source in node.all_input_nodes if tensor_of(source) is None), None), facts)


def _same(node: Node, facts: BatchFacts) -> Growth:
    """Moved, chosen or copied elements of one tensor; the other arguments are constants."""
    value = tensor_of(node)
    others = node.all_input_nodes[1:]
    if value is None or not value.is_floating_point() or any(facts.depends(other) for other in others):
        return None
    return growth(node.args[0], facts)


def _is_no_count(constant: object, facts: BatchFacts) -> bool:
    """Whether a constant is surely not the number of rows, which a capture for one number of them has as a constant too."""
    return facts.has_symbolic_rows or constant_of(constant) is None


def _has_plain_rows(operand: object, facts: BatchFacts) -> bool:
    return facts.has_rows(operand) and facts.mixed([operand]) is None


def _tensor(value: object) -> torch.Tensor | None:
    """The example tensor of an argument; None for a number."""
    return tensor_of(value) if isinstance(value, Node) else None


_SAME = (
    ("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten", "unflatten", "expand", "contiguous", "clone", "alias", "to")
    + ("_to_copy", "type_as", "detach", "neg", "negative", "select", "slice", "narrow", "permute", "transpose", "t", "diagonal", "trace")
    + ("flip", "roll", "cumsum", "index", "index_select")
)  # fmt: skip

_RULES: dict[str, Callable[[Node, BatchFacts], Growth]] = {
    **{f"aten.{name}": _same for name in _SAME},
    **{f"aten.{name}": _filled for name in ("scalar_tensor", "full", "new_full", "full_like")},
    "aten.sum": _reduced("sum"),
    "aten.mean": _reduced("mean"),
    **{f"aten.{name}": _product for name in ("mm", "matmul", "bmm", "mv", "dot", "vdot")},
    "aten.einsum": _einsum,
    "aten.linear": _linear,
    **{f"aten.{name}": _times for name in ("mul", "multiply")},
    **{f"aten.{name}": _over for name in ("div", "divide", "true_divide")},
    **{f"aten.{name}": _sum_of_two for name in ("add", "sub")},
    **{f"aten.{name}": _joined for name in ("cat", "stack", "concat")},
}
