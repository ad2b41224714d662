"""Which rule an op has: the user's own, one of the table, or torch's tag."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

from whale.axes.notation import parse
from whale.axes.rules.pointwise import pointwise
from whale.axes.rules.table import TABLE, Rule
from whale.errors import ConfigError
from whale.ir.graph import Op

_own_rules: ContextVar[Mapping[str, str]] = ContextVar("own_rules", default=MappingProxyType({}))


def register_rule(target: str, notation: str) -> None:
    """Gives an op of your own a rule, so that its axes can be cut.

    Args:
        target: ``library.op`` or ``library.op.overload``, as ``torch.ops`` has it; ``library::op`` is the same. A rule for one of
            torch's own ops replaces the built-in one.
        notation: for example ``"input[... i] weight[o i] -> [... o]"``; docs/axes.md explains it. Operands are the
            op's tensor arguments in order. The rule is believed: it must hold for any part of a letter.

    Raises:
        ConfigError: the notation cannot be read, or the target names no library.
    """
    name = target.replace("::", ".")
    if "." not in name:
        raise ConfigError(f"an operator is named with its library ({target!r})", hint=f"for example: mylib.{target}")
    parse(notation)
    _own_rules.set(MappingProxyType({**_own_rules.get(), name: notation}))


def find_rule(op: Op) -> Rule | None:
    """The rule of an op: the user's own, one for the overload, torch's pointwise tag, one for the operator; else None."""
    packet = op.target.rpartition(".")[0] if op.target.count(".") > 1 else op.target
    own = _own_rules.get()
    for name in (op.target, packet):
        if name in own:
            return own[name]
    if op.target in TABLE:
        return TABLE[op.target]
    if "pointwise" in op.tags:
        return pointwise
    return TABLE.get(packet) or TABLE.get(packet.rstrip("_"))
