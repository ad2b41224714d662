"""Which ops mix samples: what a cut of the batch would change, and what it would not."""

from __future__ import annotations

from collections.abc import Mapping

from whale.axes.checks import CONTRACTED_AND_KEPT, TWICE
from whale.axes.reading import NO_RULE
from whale.axes.values import Mixing, OpAxes, Role, axes_of
from whale.ir.graph import ModelGraph, Op, Ref
from whale.ir.plan import BATCH


def find_mixing(graph: ModelGraph, ops: Mapping[str, OpAxes]) -> tuple[Mixing, ...]:
    """Ops that need the batch whole or combine samples, except where the loss adds up its terms."""
    added_up = _added_up(graph, ops)
    found = []
    for op in graph.ops:
        role = ops[op.name].roles.get(BATCH) if op.name in ops else None
        if role is None or role.kind in ("kept", "broadcast"):
            continue
        if role.kind == "contracted":
            if op.name not in added_up:
                found.append(Mixing(op.name, f"combines samples by {role.combine} ({op.target})", op.where, "mixes"))
        elif not _inherited(op, role, ops):
            kind = "no rule" if role.reason == NO_RULE.reason else "mixes"
            reason = f"{op.target}: no rule, cannot tell" if kind == "no rule" else f"{op.target} {role.reason}"
            found.append(Mixing(op.name, reason, op.where, "no rule" if kind == "no rule" else "mixes"))
    return tuple(found)


def _inherited(op: Op, role: Role, ops: Mapping[str, OpAxes]) -> bool:
    """Whether the op only meets the batch twice because an operand has it twice already."""
    return role in (TWICE, CONTRACTED_AND_KEPT) and any(_has_it_twice(ops[name]) for name in op.inputs if name in ops)


def _has_it_twice(op: OpAxes) -> bool:
    return any(sum(axes_of(dim).count(BATCH) for dim in dims) > 1 for dims in op.outputs)


_LINEAR = frozenset(
    f"aten.{name}"
    for name in ("add", "sub", "neg", "mul", "div", "to", "_to_copy", "clone", "alias", "sum", "view", "reshape", "squeeze", "unsqueeze")
)


def _added_up(graph: ModelGraph, ops: Mapping[str, OpAxes]) -> set[str]:
    """The ops whose sums over the batch are the loss terms' sums and weights: walking back from these through linear ops
    that no longer have the batch."""
    found: set[str] = set()
    waiting = [name for term in graph.loss for name in (term.sum, term.weight) if name in ops]
    while waiting:
        name = waiting.pop()
        if name in found or name is None:
            continue
        found.add(name)
        op = graph.by_name[name]
        if BATCH not in ops[name].roles and _is_linear(op):
            waiting += [source for source in op.inputs if source in ops]
    return found


def _is_linear(op: Op) -> bool:
    packet = op.target.rpartition(".")[0].rstrip("_")
    if packet in ("aten.mul", "aten.div"):
        return not isinstance(op.args[1], Ref)
    return packet in _LINEAR
