"""The ops under one scope."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The ops of the model under one scope.

    Attributes:
        index: position in the plan's order.
        name: the scope's name, or a name made from its place.
        strategy: ``replicate`` or ``split``.
        ops: names, in graph order.
    """

    index: int
    name: str
    strategy: str
    ops: tuple[str, ...]
