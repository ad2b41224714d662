"""Declarations of configuration keys: default, rule, one line of documentation; and the known name nearest to an unknown one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_type_hints

from whale.ir.graph import MOST_ROWS

KeyType = Literal["bool", "int", "float", "str"]
Shares = tuple[tuple[int, float | str], ...]  # stage numbers, ascending, with a share from 0 to 1 each, or a word
ByName = tuple[tuple[str, str], ...]  # patterns of names, the last ``*``, with a word each; the first match counts

Choice = str | ByName  # one of some words, or one by patterns of parameter names
Recomputation = str | Shares | ByName  # a value of ``recompute.policy``


def choice_text(value: Choice | Recomputation) -> str:
    """A choice as a user writes it."""
    if isinstance(value, str):
        return value
    return f"{{{', '.join(f'{json.dumps(each)}: {choice}' for each, choice in value)}}}"


TYPE_WORDS: dict[KeyType, str] = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


@dataclass(frozen=True, slots=True)
class ValueRule:
    """A condition on a value, with the words for it (``at least 1``)."""

    words: str
    holds: Callable[[Any], bool]


def at_least(low: int) -> ValueRule:
    return ValueRule(f"at least {low}", lambda value: bool(value >= low))


def above(low: float) -> ValueRule:
    return ValueRule(f"above {low:g}", lambda value: bool(value > low))


def between(low: float, high: float) -> ValueRule:
    """The value is above `low` and at most `high`."""
    return ValueRule(f"above {low:g} and at most {high:g}", lambda value: bool(low < value <= high))


def from_up_to(low: float, high: float) -> ValueRule:
    """The value is at least `low` and below `high`."""
    return ValueRule(f"at least {low:g} and below {high:g}", lambda value: bool(low <= value < high))


def range_of(text: str) -> tuple[int, int] | None:
    """The ends of a range such as ``64..256``; None unless they are whole numbers from 1 to `MOST_ROWS`, the smaller first."""
    ends = [end.strip() for end in text.split("..")]
    if len(ends) != 2 or not all(end.isdecimal() and len(end) < 10 for end in ends):
        return None
    low, high = int(ends[0]), int(ends[1])
    return (low, high) if 1 <= low <= high <= MOST_ROWS else None


def a_range() -> ValueRule:
    """The value is the text of a range."""
    return ValueRule(f"like 64..256, whole numbers from 1 to {MOST_ROWS:,}, the smaller first", lambda value: range_of(value) is not None)


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key."""

    name: str  # ``section.key``
    type: KeyType  # of its values; a quantity with a unit may also be text
    optional: bool  # whether ``None`` is a value
    default: object
    doc: str  # one line
    rule: ValueRule | None  # what must hold of a value
    choices: tuple[str, ...]  # the only values, if listed
    # choices of a single stage, if a mapping of stage numbers to these, and to shares from 0 to 1, is a value too; as sorted pairs
    by_stage: tuple[str, ...]
    # choices by patterns of names, the last ``*``, if a mapping of these is a value too; as pairs, in order
    by_name: tuple[str, ...]
    unit: str | None  # of a quantity that may be text (``B``: ``25 MiB``)
    named: str = "parameter"  # what has the names of `by_name`

    @property
    def takes(self) -> str:
        """What it accepts, in words."""
        if self.choices:
            by_stage = f", or by stage a share from 0 to 1 or one of {', '.join(self.by_stage)}" if self.by_stage else ""
            by_name = f", or by pattern of {self.named} names, the last *, one of {', '.join(self.by_name)}" if self.by_name else ""
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
    named: str = "parameter",
    unit: str | None = None,
) -> Any:
    """Declares a field of a section; the arguments are those of `Key`."""
    metadata = {"doc": doc, "rule": rule, "choices": choices, "by_stage": by_stage, "by_name": by_name, "named": named, "unit": unit}
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
    """The known name most similar to `name`, ignoring case; None if none has at least a similarity of `cutoff`, 0 to 1."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def begun_by(name: str, known: Iterable[str]) -> list[str]:
    """The known names with this prefix, up to a ``-`` if there are such: ``V100`` begins ``V100-16GB``, and so does ``V10``."""
    longer = [each for each in known if name and each.lower().startswith(name.lower())]
    return [each for each in longer if each[len(name) :].startswith("-")] or longer


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the nearest name, or the list of all."""
    names = list(known)
    return guess(name, names) or f"known: {', '.join(names)}"


# other spellings of the types that settings name; by letters alone ``bfloat16`` is nearest to ``float32``
_SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "fp32": "float32", "float": "float32"}


def guess(name: str, known: Iterable[str]) -> str | None:
    """A hint for an error that lists all names: the same in another spelling, else the nearest."""
    names = list(known)
    same = _SPELLINGS.get(name.lower().removeprefix("torch."))
    found = same if same in names else nearest(name, names)
    return f"did you mean {found!r}?" if found else None
