"""The configuration as Markdown tables, for the reference; made from the declarations, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Iterable

from whale.config.epl import EPL_KEYS
from whale.config.loading import variable_of
from whale.config.settings import KEYS
from whale.units import format_bytes


def key_table() -> str:
    """Every key: what it takes, its default, its environment variable, what it is."""
    rows = ((f"`{key.name}`", key.takes, _default(key.default, key.unit), f"`{variable_of(key.name)}`", key.doc) for key in KEYS.values())
    return _table(("key", "takes", "default", "environment variable", "what it is"), rows)


def epl_table() -> str:
    """Every key of EPL: whether it carries over, and what became of it."""
    rows = ((f"`{entry.name}`", "yes" if entry.carries else "no", entry.note) for entry in EPL_KEYS)
    return _table(("EPL's key", "accepted", "in Whale"), rows)


def _default(value: object, unit: str | None) -> str:
    if value is None:
        return "null"
    if unit == "B" and isinstance(value, int):
        return f"{value} ({format_bytes(value)})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
