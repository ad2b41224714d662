"""The walk back from a loss to its leaves, through sums, constant factors, quotients and changes of shape."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from fractions import Fraction
from typing import cast

import torch
from torch.fx import Node

from whale.axes.operators import Rows
from whale.capture.flat.aliasing import DETACH
from whale.capture.loss.facts import BatchFacts, constant_of, is_scalar, rounds, rows_of, tensor_of
from whale.capture.loss.leaves import (
    Counted,
    Factor,
    LossPart,
    NodeBuilder,
    PerRow,
    complete,
    count_selected,
    describe,
    is_full_reduction,
    leaf_part,
    reduction_part,
    the_node,
)
from whale.capture.source import line_of
from whale.errors import CaptureError

aten = torch.ops.aten

ONE = Fraction(1)
_ITEMS = (aten.item.default, aten._local_scalar_dense.default)


class LossWalk:
    """Splits scalars of one graph into parts.

    Args:
        rows: the placeholder that holds the number of rows; None in a capture for one number of rows.
        settled: values that are not to be split.
    """

    def __init__(self, facts: BatchFacts, rows: Node | None, settled: Collection[Node] = ()) -> None:
        self._settled = settled
        self._facts = facts
        self._rows = rows
        self.passed: list[Node] = []  # the ops that were split

    def parts(self, node: Node) -> list[LossPart]:
        """The parts whose sum a scalar is; at worst one opaque part."""
        if not self._facts.depends(node):
            return [LossPart(node, lambda build: self._times_rows(build, node), PerRow(ONE))]
        found = self._through(node)
        return [self._without_rows(node)] if found is None else found

    def pair(self, total: Node, weight: Node) -> list[LossPart]:
        """The parts of a (sum, weight) that the user returned; refuses a sum that is a mean."""
        parts = self.parts(total)
        weight = _read_from(weight)
        if not self._facts.depends(weight):
            number = constant_of(weight)  # the same for every piece: a factor, not a count
            return _scaled(parts, 1.0 / number) if number is not None else [part.by(Factor(weight, divides=True)) for part in parts]
        if any(part.divisor is not None and part.exact for part in parts):
            raise CaptureError(
                "the sum of the returned (sum, weight) is a mean, or does not grow with the rows",
                where=line_of(total),
                hint="return the mean alone, or the sum over the rows with its weight",
            )
        reason = next((f"the returned (sum, weight): {part.reason}" for part in parts if not part.exact), "")
        if self._facts.needs_gradient(weight):
            reason = reason or "the weight of the returned (sum, weight) depends on the parameters"
        counted = None if reason else self._counted(weight)
        if counted is None:
            reason = reason or f"the weight of the returned (sum, weight), {describe(weight)}, is not a sum over the rows of the batch"

            def quotient(build: NodeBuilder) -> Node:
                return self._times_rows(build, build.call(aten.div.Tensor, total, weight))

            return [LossPart(total, quotient, PerRow(ONE), reason=reason)]
        return [LossPart(total, the_node(total), counted)]

    def _through(self, node: Node) -> list[LossPart] | None:
        if node in self._settled:
            return None
        rule = _RULES.get(rows_of(node))
        if rule is not None:
            found = rule(self, node)
        else:
            part = leaf_part(node, self._facts)
            found = None if part is None else [part]
        if found is not None:
            self.passed.append(node)
        return found

    # -- rules ---------------------------------------------------------------------------------

    def _same_value(self, node: Node) -> list[LossPart] | None:
        source = node.args[0]
        if not isinstance(source, Node) or not is_scalar(source) or not is_scalar(node):
            return None
        before, after = tensor_of(source), tensor_of(node)
        assert before is not None and after is not None
        if not after.is_floating_point() and before.dtype != after.dtype:
            return None
        found = self.parts(source)
        return [replace(part, total=_without_gradient(part), factors=()) for part in found] if node.target in DETACH else found

    def _negated(self, node: Node) -> list[LossPart] | None:
        found = self._same_value(node)
        return None if found is None else _scaled(found, -1.0)

    def _sum_of_two(self, node: Node) -> list[LossPart] | None:
        left, right = node.args[0], node.args[1]
        alpha = constant_of(node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1))
        if alpha is None:
            return None
        signs = {"added": (1.0, alpha), "subtracted": (1.0, -alpha)}.get(rows_of(node) or "", (-alpha, 1.0))
        found: list[LossPart] = []
        for operand, sign in zip((left, right), signs, strict=True):
            addend = self._addend(node, operand)
            if addend is None:
                return None
            found += _scaled(addend, sign)
        return found

    def _addend(self, node: Node, operand: object) -> list[LossPart] | None:
        number = constant_of(operand)
        if number is not None:
            return [] if number == 0.0 else [LossPart(node, lambda build: self._ones(build, node), PerRow(ONE)).scaled(number)]
        return self.parts(operand) if isinstance(operand, Node) and is_scalar(operand) else None

    def _product(self, node: Node) -> list[LossPart] | None:
        left, right = node.args[0], node.args[1]
        if not is_scalar(left) or not self._facts.depends(left):
            left, right = right, left
        if not isinstance(left, Node) or not is_scalar(left):
            return None
        return self._scale(self.parts(left), right, divide=False)

    def _quotient(self, node: Node) -> list[LossPart] | None:
        left, right = node.args[0], node.args[1]
        if node.kwargs.get("rounding_mode") is not None or not isinstance(left, Node) or not is_scalar(left):
            return None
        return self._scale(self.parts(left), right, divide=True)

    def _reduction(self, node: Node) -> list[LossPart] | None:
        operand = node.args[0]
        if not isinstance(operand, Node) or not is_full_reduction(node):
            return None
        mean = rows_of(node) == "mean"
        joined = operand.args[0] if rows_of(operand) == "joined" else None
        if isinstance(joined, (list, tuple)) and all(is_scalar(item) for item in joined):
            share = 1.0 / len(joined) if mean else 1.0
            return _scaled([part for item in joined for part in self.parts(cast(Node, item))], share)
        return self._reduced(node, operand, mean)

    def _reduced(self, node: Node, operand: Node, mean: bool) -> list[LossPart] | None:
        """The reduction of an operand; a divisor that spans the batch is factored out: ``(x / s).sum() = x.sum() / s``."""
        if rows_of(operand) == "divided" and operand.kwargs.get("rounding_mode") is None:
            inner, scalar = operand.args
            if isinstance(inner, Node) and not is_scalar(inner) and self._spans_batch(scalar):
                found = self._reduced(node, inner, mean)
                scaled = None if found is None else self._scale(found, scalar, divide=True)
                if scaled is not None:
                    return scaled
        part = reduction_part(node, operand, self._facts, mean=mean)
        return None if part is None else [part]

    def _spans_batch(self, scalar: object) -> bool:
        """Whether a scalar is a number of rows, a sum over the batch, or similar."""
        if self._rows is None and constant_of(scalar) is not None:
            return True
        return self._facts.depends(scalar) and (is_scalar(scalar) or tensor_of(cast(Node, scalar)) is None)

    # -- scaling -------------------------------------------------------------------------------

    def _scale(self, parts: list[LossPart], scalar: object, *, divide: bool) -> list[LossPart] | None:
        """Parts times, or over, a scalar; None if the result is no sum of parts."""
        number = constant_of(scalar)
        if number is not None and self._rows is None and divide and _is_whole_sum(parts):
            taken = self._over_baked_rows(parts, number)
            if taken is not None:
                return taken
        if number is not None:
            return None if divide and number == 0.0 else _scaled(parts, 1.0 / number if divide else number)
        if not isinstance(scalar, Node):
            return None
        scalar = _read_from(scalar)
        if tensor_of(scalar) is None:
            share = self._facts.proportion(scalar)
            if share:
                return complete([part.over_rows(share) if divide else part.times_rows(share) for part in parts])
            return self._over_sum(parts, scalar) if divide else None
        if not is_scalar(scalar):
            return None
        if not self._facts.depends(scalar):
            return [part.by(Factor(scalar, divides=divide)) for part in parts]
        return self._over_sum(parts, scalar) if divide else None

    def _over_sum(self, parts: list[LossPart], divisor: Node) -> list[LossPart] | None:
        """Parts over a sum over the batch, as in a masked mean."""
        if self._facts.needs_gradient(divisor):
            return None
        counted = self._counted(divisor)
        if counted is not None:
            return [replace(part, divisor=counted) for part in parts] if _is_whole_sum(parts) else None
        below = [] if tensor_of(divisor) is None else self.parts(divisor)
        if len(below) == 1 and below[0].exact:
            return complete([_over_mean(part, below[0]) for part in parts])
        return None

    def _counted(self, divisor: Node) -> Counted | None:
        """A divisor known for the whole batch: its rows, or a sum of what pieces of it make; None for any other."""
        if tensor_of(divisor) is None:
            selected = self._facts.selected(divisor)
            if selected is not None and self._facts.is_known_before(selected[0]):
                return Counted(lambda build: count_selected(build, *selected))
            return Counted(the_node(divisor)) if self._facts.follows_rows(divisor) else None
        core, offset, minimum = _peel(divisor)
        return Counted(the_node(core), offset, minimum) if all(part.is_plain for part in self.parts(core)) else None

    def _over_baked_rows(self, parts: list[LossPart], number: float) -> list[LossPart] | None:
        """A sum over a constant that may be the number of rows, in a capture that has it as a constant."""
        if number <= 0 or number % self._facts.num_rows:
            return None
        count = Fraction(int(number), self._facts.num_rows)
        reason = f"captured for {self._facts.num_rows} rows only, so the divisor {number:g} is taken for {count} x the rows"
        return [replace(part, divisor=PerRow(count), reason=reason) for part in parts]

    # -- what has no rows ----------------------------------------------------------------------

    def _without_rows(self, node: Node) -> LossPart:
        """The part of a scalar that cannot be split: pieces add up, or are averaged by rows."""
        found = self._facts.over_rows(node)
        if found == "sum":
            return LossPart(node, the_node(node))
        reason = "" if found == "mean" else f"{describe(node)} is not a sum over the rows of the batch"
        return LossPart(node, lambda build: self._times_rows(build, node), PerRow(ONE), reason=reason)

    def _times_rows(self, build: NodeBuilder, node: Node) -> Node:
        value = tensor_of(node)
        if value is not None and value.dtype in (torch.float16, torch.bfloat16):
            node = build.call(aten._to_copy.default, node, dtype=torch.float32)
        return build.call(aten.mul.Tensor, node, self._facts.num_rows if self._rows is None else self._rows)

    def _ones(self, build: NodeBuilder, node: Node) -> Node:
        like = tensor_of(node)
        assert like is not None
        one = build.call(aten.full.default, [], 1.0, dtype=like.dtype, device=like.device)
        return self._times_rows(build, one)


def _read_from(number: Node) -> Node:
    """The tensor from which ``item()`` read a number; any other node itself."""
    return cast(Node, number.args[0]) if number.target in _ITEMS else number


def _scaled(parts: list[LossPart], factor: float) -> list[LossPart]:
    return [part.scaled(factor) for part in parts]


def _is_whole_sum(parts: list[LossPart]) -> bool:
    return all(part.divisor is None for part in parts)


def _over_mean(part: LossPart, mean: LossPart) -> LossPart | None:
    """A mean over a mean is a sum over a sum: ``(S / k rows) / (c M / l rows) = l / (k c) x S / M``."""
    if not isinstance(part.divisor, PerRow) or not isinstance(mean.divisor, PerRow):
        return None
    factor = float(mean.divisor.count / part.divisor.count) / mean.coefficient
    return replace(part, divisor=Counted(mean.emit_sum)).scaled(factor)


def _without_gradient(part: LossPart) -> Callable[[NodeBuilder], Node]:
    return lambda build: build.call(aten.detach.default, part.emit_sum(build))


def _peel(divisor: Node) -> tuple[Node, float, float | None]:
    """A divisor ``max(core + offset, minimum)`` as its three parts."""
    core, offset, minimum = divisor, 0.0, None
    while isinstance(core.args[0] if core.args else None, Node):
        does, inner = rows_of(core), cast(Node, core.args[0])
        if does == "bounded" and offset == 0.0 and minimum is None:
            minimum = _lower_bound(core)
            if minimum is None:
                break
        elif does == "added" and len(core.args) == 2 and not core.kwargs and constant_of(core.args[1]) is not None:
            offset += constant_of(core.args[1]) or 0.0
        elif does not in ("same", "moved") or not is_scalar(inner) or core.target in DETACH or rounds(core):
            break
        core = inner
    return core, offset, minimum


def _lower_bound(clamp: Node) -> float | None:
    """The bound of a clamp that has a lower one only."""
    bounds = (*clamp.args[1:], clamp.kwargs.get("min"), clamp.kwargs.get("max"))
    given = [bound for bound in bounds if bound is not None]
    is_lower = (len(clamp.args) > 1 and clamp.args[1] is not None) or "min" in clamp.kwargs
    return constant_of(given[0]) if len(given) == 1 and is_lower else None


_RULES: dict[Rows | None, Callable[[LossWalk, Node], list[LossPart] | None]] = {
    "same": LossWalk._same_value,
    "moved": LossWalk._same_value,
    "negated": LossWalk._negated,
    "added": LossWalk._sum_of_two,
    "subtracted": LossWalk._sum_of_two,
    "subtracted from": LossWalk._sum_of_two,
    "multiplied": LossWalk._product,
    "divided": LossWalk._quotient,
    "sum": LossWalk._reduction,
    "mean": LossWalk._reduction,
}
