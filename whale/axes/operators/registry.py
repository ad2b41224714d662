"""The registry of operators, and the rules that users add."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

from whale.axes.notation import parse, placed_operands
from whale.axes.operators.entry import Family, Operator, Rows
from whale.axes.operators.lookups import LOOKUPS
from whale.axes.operators.matrices import ATTENTION, MATRICES, RECURRENCES
from whale.axes.operators.pointwise import FACTORIES, POINTWISE, copied, pointwise
from whale.axes.operators.reductions import ALONG_A_DIMENSION, LOSSES, NORMALISATIONS, REDUCTIONS
from whale.axes.operators.shapes import SHAPES
from whale.axes.operators.space import FREQUENCIES, SPACE
from whale.axes.outcome import argument
from whale.axes.values import Role
from whale.errors import ConfigError
from whale.ir.graph import Op, Ref, operator_name

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Matrices": MATRICES,
        "Attention": ATTENTION,
        "Lookups and writes": LOOKUPS,
        "Normalisations": NORMALISATIONS,
        "Losses": LOSSES,
        "Reductions": REDUCTIONS,
        "Along a dimension": ALONG_A_DIMENSION,
        "Shapes": SHAPES,
        "Space": SPACE,
        "Frequencies": FREQUENCIES,
        "Recurrences": RECURRENCES,
        "Factories": FACTORIES,
        "Pointwise": POINTWISE,
    }
)

# by name or ``name.overload``
OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {name: entry for family in FAMILIES.values() for names, entry in family.items() for name in names.split()}
)

# defaults: of torch's operators without an entry, of those tagged ``pointwise``, and of other libraries
UNKNOWN, PLAIN, OWN = Operator(on_parts=None), Operator(pointwise), Operator()

_own_rules: ContextVar[Mapping[str, OwnRule]] = ContextVar("own_rules", default=MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class OwnRule:
    """What a user says of an operator."""

    axes: str
    rows: Rows | None


def register_rule(target: str, notation: str, rows: Literal["linear"] | None = None) -> None:
    """Gives an op of your own a rule, so that its axes can be cut.

    Args:
        target: ``library.op`` or ``library.op.overload``, as ``torch.ops`` has it; ``library::op`` is the same. A rule for one of
            torch's own ops replaces the built-in one.
        notation: for example ``"input[... i] weight[o i] -> [... o]"``; docs/axes.md explains it. Operands are the op's tensor arguments in
            order. The rule is not checked: it must hold for any part of a letter.
        rows: ``linear`` if it is a linear function of its first operand: then it makes sums, or means, over rows of such. What it does
            with rows themselves follows from the notation.

    Raises:
        ConfigError: the notation or `rows` cannot be read, or the target names no library.
    """
    name = target.replace("::", ".")
    if "." not in name:
        raise ConfigError(f"operator name {target!r} lacks its library", hint=f"for example: mylib.{target}")
    parse(notation)
    if rows not in (None, "linear"):
        raise ConfigError(f"rows={rows!r} of {target!r} is unknown", hint="'linear', or leave it out")
    _own_rules.set(MappingProxyType({**_own_rules.get(), name: OwnRule(notation, rows)}))


def operator_of(op: Op) -> Operator:
    """The entry of an op's operator, with the user's own rule if there is one."""
    return _with_own(entry_of(op.target, "pointwise" in op.tags), op.target)


def _with_own(entry: Operator, target: str) -> Operator:
    own = _own_rules.get()
    if not own:
        return entry
    rule = own.get(target) or own.get(target.rpartition(".")[0] if target.count(".") > 1 else target)
    return replace(entry, axes=rule.axes, rows=rule.rows or entry.rows) if rule else entry


@cache
def entry_of(target: str, is_pointwise: bool = False) -> Operator:
    """The built-in entry of an operator: that of the overload, else of all its overloads, in place or not."""
    if target.startswith("aten."):
        names = target.removeprefix("aten."), target.removeprefix("aten.").replace("_.", "."), operator_name(target)
        found = next((OPERATORS[name] for name in names if name in OPERATORS), None)
        return found or (PLAIN if is_pointwise else UNKNOWN)
    return PLAIN if is_pointwise else OWN


# a condition that is checked, and one result of several
_TAKEN: Mapping[str, Rows] = MappingProxyType({"whale.held": "same", "operator.getitem": "moved"})


def entry_of_call(target: str) -> Operator:
    """The entry of an operator on tensors or integers (``operator.mul``), for what it makes of values that are combined over rows."""
    return _with_own(_entry_of_call(target), target)


@cache
def _entry_of_call(target: str) -> Operator:
    library, _, name = target.partition(".")
    if target in _TAKEN:
        return Operator(rows=_TAKEN[target])
    return entry_of(f"aten.{name}") if library in ("aten", "operator") else UNKNOWN


def is_pointwise(op: Op) -> bool:
    """Whether each element of an op's results depends on one of each operand, by torch's tag or the entry."""
    return entry_of(op.target, "pointwise" in op.tags).axes in (pointwise, copied)


def added_operand(op: Op) -> str | None:
    """The op that makes the operand added to the product; None if there is none."""
    name, position = operator_of(op).added or ("", -1)
    value = argument(op, position, name) if name else None
    return value.op if isinstance(value, Ref) else None


def gathered_operands(op: Op, role: Role) -> frozenset[str]:
    """The ops that make the operands which every part needs whole along an axis, by their places among the tensors that an op reads."""
    if not role.gathers:
        return frozenset()
    given, named = placed_operands(op), dict(op.kwargs)
    found = (given[place] if place < len(given) else named.get(name) for name, place in role.gathers)
    return frozenset(each.op for each in found if isinstance(each, Ref))
