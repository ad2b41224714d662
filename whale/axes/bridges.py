"""Bridges inside a split stage: what turns a tensor as one op makes it into the form in which others use it.

                            used whole        used whole by parts     used cut along b
    whole                   nothing           nothing                 the own part
                            - nothing         - all-reduce            - all-gather
    cut along a             all-gather        all-gather              all-to-all (nothing if a is b)
                            - the own part    - reduce-scatter        - all-to-all
    sum over the group      all-reduce        (as whole)              reduce-scatter
                            - nothing                                 - all-gather
The second lines are the adjoints, for the gradients. "By parts": the user works on parts of an axis that the tensor
lacks, so that its gradients are partial. A bridge is shared by all users of one form; a gather followed by a cut is
never made, since each form comes from what the op made.

Received by each of t devices, in elements of a tensor of N of which it holds n_i (even cuts: N / t):

    nothing, the own part    0
    all-gather               N - n_i           lower bound: what it does not have
    all-to-all               n'_i (1 - 1/t)    lower bound: its new part without what it had of it
    reduce-scatter           n_i (t - 1)       lower bound for sums that are made where they are kept
    all-reduce               2 N (t - 1) / t   a reduce-scatter and an all-gather
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from whale.axes.labels import Labels, Use
from whale.ir.graph import Op

Transport = Literal["", "part", "all-gather", "all-to-all", "all-reduce", "reduce-scatter"]
"""What moves: nothing, the own part is taken, or a collective."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """One tensor of a stage, brought into one form.

    Attributes:
        tensor: the op that makes it.
        source: the axis along which it lies in parts; None where it is whole (or a sum, if `is_sum`).
        target: the axis along which its users need it in parts; None where they need it whole.
        entered: whether the users work on parts of an axis that it lacks.
        is_sum: whether what the op makes is still to be summed over the group.
        users: the ops that need it so; empty for the sum itself.
        has_gradient: whether a gradient returns.
        combine: for a sum, how results for parts are combined (`whale.axes.Role`).
    """

    tensor: str
    source: str | None
    target: str | None
    entered: bool = False
    is_sum: bool = False
    users: tuple[str, ...] = ()
    has_gradient: bool = True
    combine: str = ""

    @property
    def forward(self) -> Transport:
        """What moves forward."""
        if self.is_sum:
            return "reduce-scatter" if self.target else "all-reduce"
        if self.source == self.target:
            return ""
        if self.source is None:
            return "part"
        return "all-to-all" if self.target else "all-gather"

    @property
    def backward(self) -> Transport:
        """What moves backward: the adjoint."""
        if not self.has_gradient:
            return ""
        if self.is_sum:
            return "all-gather" if self.target else ""
        if self.source is None:
            return "all-gather" if self.target else "all-reduce" if self.entered else ""
        if self.target is None:
            return "reduce-scatter" if self.entered else "part"
        return "all-to-all" if self.source != self.target else ""

    def __str__(self) -> str:
        source = "sum" if self.is_sum else f"cut {self.source}" if self.source else "whole"
        target = f"cut {self.target}" if self.target else "whole by parts" if self.entered else "whole"
        return f"{self.tensor}: {source} -> {target}  {self.forward or 'nothing'} / {self.backward or 'nothing'}"


def find_bridges(labels: Labels, returned: frozenset[str] = frozenset()) -> tuple[Bridge, ...]:
    """All bridges of a stage at which something moves, in graph order of the tensors.

    Args:
        labels: of the stage.
        returned: values that the stage hands on: they are made whole.

    Gradients of parameters are synchronised once per step, not here, where all users of a whole one work on parts.
    """
    users: dict[tuple[str, Use], list[str]] = {}
    for op in labels.calls:
        for operand in _tensors(labels, op):
            users.setdefault((operand, labels.use(op.name, operand)), []).append(op.name)
    for name in returned:
        users.setdefault((name, labels.returned(name)), [])
    found = [*_sums(labels), *_between(labels, users)]
    return tuple(sorted(found, key=lambda bridge: labels.graph.position[bridge.tensor]))


def _tensors(labels: Labels, op: Op) -> Iterator[str]:
    """The operands of an op that are one tensor each."""
    if op.target != "operator.getitem":
        yield from (name for name in op.inputs if len(labels.graph.by_name[name].outputs) == 1)


def _sums(labels: Labels) -> Iterator[Bridge]:
    for op in labels.calls:
        if labels.is_summed(op.name):
            combine = labels.axes.ops[op.name].roles[labels.work[op.name]].combine
            yield Bridge(op.name, None, labels.scattered.get(op.name), is_sum=True, has_gradient=op.requires_grad, combine=combine)


def _between(labels: Labels, users: dict[tuple[str, Use], list[str]]) -> Iterator[Bridge]:
    synchronized = frozenset(labels.synchronized)
    for (tensor, use), ops in users.items():
        op = labels.graph.by_name[tensor]
        gradient = op.requires_grad and any(labels.graph.by_name[user].requires_grad for user in ops or [tensor])
        gradient = gradient and tensor not in synchronized
        bridge = Bridge(tensor, labels.held(tensor), use.axis, use.entered, False, tuple(ops), gradient)
        if bridge.forward or bridge.backward:
            yield bridge
