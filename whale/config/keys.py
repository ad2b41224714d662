"""How a configuration key is declared: its default, its rule, its one line of documentation; the known name nearest to an unknown one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_type_hints

KeyType = Literal["bool", "int", "float", "str"]
Shares = tuple[tuple[int, float | str], ...]
"""Stage numbers, ascending, with a share from 0 to 1 each, or a word."""

Choice = str | tuple[tuple[str, str], ...]
"""One of some words, or one by patterns of parameter names, of which the first that matches counts."""


def choice_text(value: Choice) -> str:
    """As a user writes it."""
    if isinstance(value, str):
        return value
    return f"{{{', '.join(f'{json.dumps(pattern)}: {choice}' for pattern, choice in value)}}}"


TYPE_WORDS: dict[KeyType, str] = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


@dataclass(frozen=True, slots=True)
class ValueRule:
    """A condition on a value, with the words for it (``at least 1``)."""

    words: str
    holds: Callable[[Any], bool]


def at_least(low: int) -> ValueRule:
    """The value is `low` or more."""
    return ValueRule(f"at least {low}", lambda value: bool(value >= low))


def above(low: float) -> ValueRule:
    """The value is more than `low`."""
    return ValueRule(f"above {low:g}", lambda value: bool(value > low))


def between(low: float, high: float) -> ValueRule:
    """The value is above `low` and at most `high`."""
    return ValueRule(f"above {low:g} and at most {high:g}", lambda value: bool(low < value <= high))


def range_of(text: str) -> tuple[int, int] | None:
    """The ends of a range that is written ``64..256``; None where it is none of whole numbers from 1 on, the smaller first."""
    low, dots, high = text.partition("..")
    if not dots or not (low.strip().isdecimal() and high.strip().isdecimal()):
        return None
    ends = int(low), int(high)
    return ends if 1 <= ends[0] <= ends[1] else None


def a_range() -> ValueRule:
    """The value is the text of a range."""
    return ValueRule("like 64..256, whole numbers from 1 on, the smaller first", lambda value: range_of(value) is not None)


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key.

    Attributes:
        name: ``section.key``.
        type: what its values are; a quantity with a unit is also accepted as text where `unit` is set.
        optional: whether ``None`` is a value.
        default: where nobody sets it.
        doc: one line.
        rule: what must hold of a value.
        choices: the only values, if listed.
        by_stage: the choices that a stage may have by itself, if a mapping of stage numbers to these, and to shares from 0 to 1, is a
            value as well; it is kept as pairs, sorted.
        by_name: the choices that parameters may have by patterns of their names, if a mapping of these, the last of which is ``*``, is a
            value as well; it is kept as pairs, in its order.
        unit: unit of a quantity that may be written as text (``B``: ``25 MiB``).
    """

    name: str
    type: KeyType
    optional: bool
    default: object
    doc: str
    rule: ValueRule | None
    choices: tuple[str, ...]
    by_stage: tuple[str, ...]
    by_name: tuple[str, ...]
    unit: str | None

    @property
    def takes(self) -> str:
        """What it accepts, in words."""
        if self.choices:
            by_stage = f", or by stage a share from 0 to 1 or one of {', '.join(self.by_stage)}" if self.by_stage else ""
            by_name = f", or by pattern of parameter names, the last *, one of {', '.join(self.by_name)}" if self.by_name else ""
            return f"one of {', '.join(self.choices)}{by_stage}{by_name}"
        words = TYPE_WORDS[self.type] + (f" {self.rule.words}" if self.rule else "")
        return words + (" or null" if self.optional else "")


def key(
    default: Any,
    doc: str,
    *,
    rule: ValueRule | None = None,
    choices: tuple[str, ...] = (),
    by_stage: tuple[str, ...] = (),
    by_name: tuple[str, ...] = (),
    unit: str | None = None,
) -> Any:
    """Declares a field of a section; the arguments are those of `Key`."""
    metadata = {"doc": doc, "rule": rule, "choices": choices, "by_stage": by_stage, "by_name": by_name, "unit": unit}
    return dataclasses.field(default=default, metadata=metadata)


def keys_of(section: str, kind: type[Any]) -> dict[str, Key]:
    """The keys that a section's dataclass declares, by full name."""
    hints = get_type_hints(kind)
    return {f"{section}.{field.name}": _key(f"{section}.{field.name}", hints[field.name], field) for field in dataclasses.fields(kind)}


def _key(name: str, hint: Any, field: dataclasses.Field[Any]) -> Key:
    members = get_args(hint) or (hint,)
    kinds = [member for member in members if member is not type(None)]
    return Key(name, kinds[0].__name__, type(None) in members, field.default, **field.metadata)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that looks most like `name`, upper and lower case alike; None if none is close.

    Args:
        name: what the user wrote.
        known: what there is.
        cutoff: similarity, 0 to 1, from which a name counts as close.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def begun_by(name: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with it, up to a ``-`` where there are such: ``V100`` begins ``V100-16GB``, and so does ``V10``."""
    longer = [each for each in known if name and each.lower().startswith(name.lower())]
    return [each for each in longer if each[len(name) :].startswith("-")] or longer


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the nearest name, or the list of all."""
    names = list(known)
    return guess(name, names) or f"known: {', '.join(names)}"


def guess(name: str, known: Iterable[str]) -> str | None:
    """A hint where the error lists all names: the nearest."""
    found = nearest(name, known)
    return f"did you mean {found!r}?" if found else None
