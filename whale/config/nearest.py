"""The nearest known name to one that nobody knows, for the hint of an error."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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
