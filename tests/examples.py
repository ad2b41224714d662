"""How many examples of a law are tried, where each of them is dear."""

from __future__ import annotations

from hypothesis import settings


def at_most(count: int) -> settings:
    """For a law that is tried with fewer examples than others are; the quick tier may try even fewer."""
    return settings(max_examples=min(count, settings().max_examples))
