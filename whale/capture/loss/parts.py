"""A part of a loss while it is taken apart: how its sum and its divisor will be built, and their arithmetic.

loss = sum over parts of  coefficient x factors x sum / divisor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch.fx import Node

from whale.capture.loss.node_builder import NodeBuilder

aten = torch.ops.aten

Emit = Callable[[NodeBuilder], Node]
"""Builds a node when the analysis is over; nothing is added to the graph before."""


@dataclass(frozen=True)
class PerRow:
    """A divisor in proportion to the rows: ``count x rows``."""

    count: Fraction


@dataclass(frozen=True)
class Counted:
    """A divisor that is itself a sum over the batch: ``max(sum of emit's values + offset, minimum)``."""

    emit: Emit
    offset: float = 0.0
    minimum: float | None = None


@dataclass(frozen=True)
class Factor:
    """A scalar that does not depend on the batch, by which a sum is multiplied or divided."""

    node: Node
    divides: bool

    def apply(self, total: Node, build: NodeBuilder) -> Node:
        return build.call(aten.div.Tensor if self.divides else aten.mul.Tensor, total, self.node)


@dataclass(frozen=True)
class Part:
    """One addend of the loss.

    Attributes:
        leaf: the op that it was, in the user's graph.
        total: builds its sum over the rows at hand.
        divisor: what the sum over the whole batch is divided by; None for 1.
        coefficient: constant factor.
        factors: scalars of the model it is scaled by.
        exact: whether sums over pieces of a batch give the loss of the whole.
        reason: why not.
    """

    leaf: Node
    total: Emit
    divisor: PerRow | Counted | None = None
    coefficient: float = 1.0
    factors: tuple[Factor, ...] = ()
    exact: bool = True
    reason: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether it is additive: its value for the batch is the sum of its values for the pieces."""
        return self.divisor is None and self.exact

    def scaled(self, factor: float) -> Part:
        """The part times a number."""
        return replace(self, coefficient=self.coefficient * factor)

    def by(self, factor: Factor) -> Part:
        """The part times, or over, a scalar of the model."""
        return replace(self, factors=(*self.factors, factor))

    def over_rows(self, count: Fraction) -> Part | None:
        """The part divided by ``count x rows``; None if that is no such part."""
        return replace(self, divisor=PerRow(count)) if self.divisor is None else None

    def times_rows(self, count: Fraction) -> Part | None:
        """The part times ``count x rows``; None if that is no such part."""
        if not isinstance(self.divisor, PerRow):
            return None
        return replace(self, divisor=None, coefficient=self.coefficient * float(count / self.divisor.count))

    def emit_sum(self, build: NodeBuilder) -> Node:
        """Builds the sum with its factors, as a tensor without dimensions."""
        total = self.total(build)
        if total.meta["val"].ndim > 0:
            total = build.call(aten.reshape.default, total, [])
        for factor in self.factors:
            total = factor.apply(total, build)
        if total.meta["val"].ndim > 0:
            total = build.call(aten.reshape.default, total, [])
        return total


def the_node(node: Node) -> Emit:
    """An emitter that gives a node which is there."""
    return lambda _build: node


def complete(parts: Sequence[Part | None]) -> list[Part] | None:
    """The parts, if there is none that failed."""
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None
