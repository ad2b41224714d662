"""Patterns of names of parameters and modules, such as ``blocks.*.weight``: the first that matches a name counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def first_match(patterns: Iterable[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def module_match(patterns: Iterable[str], path: str) -> tuple[str, str]:
    """The first pattern, of which the last is ``*``, that matches a module or one around it; and of these modules the outermost."""
    parts = path.split(".")
    around = [".".join(parts[: stop + 1]) for stop in range(len(parts))]
    return next((pattern, name) for pattern in patterns for name in around if fnmatchcase(name, pattern))


def idle_patterns(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Patterns that count for none of these names; the last, for all others, may be one."""
    used = {first_match(patterns, name) for name in names}
    return [pattern for pattern in patterns[:-1] if pattern not in used]
