"""An annotation as the user wrote it: `replicate` or `split`, where in the code, and how scopes enclose one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A file and a line of the user's code; prints as ``file:line``."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


ScopeKind = Literal["replicate", "split"]


@dataclass(frozen=True, slots=True)
class Scope:
    """One entry of a ``with whale.replicate(...)`` or ``with whale.split(...)``.

    Attributes:
        kind: ``replicate`` cuts the batch axis, ``split`` cuts another one.
        device_count: devices (for an enclosing scope: copies) asked for; None lets the planner say.
        name: the user's name; entries of one explicit name are one TaskGraph.
        axis: the axis that a `split` insists on.
        where: the user's line.
        entry: number of this entry in the order of entering; tells unnamed scopes apart.
        is_default: the scope came from `whale.set_default_strategy`.
    """

    kind: ScopeKind
    device_count: int | None
    name: str | None
    axis: str | None
    where: SourceLine | None
    entry: int
    is_default: bool = False

    @property
    def key(self) -> str:
        """What makes two entries the same TaskGraph: the explicit name, else the entry number."""
        return self.name if self.name is not None else f"{self.kind}#{self.entry}"

    def __str__(self) -> str:
        count = "" if self.device_count is None else str(self.device_count)
        parts = [part for part in (count, f"name={self.name!r}" if self.name else "", f"axis={self.axis!r}" if self.axis else "") if part]
        return f"{self.kind}({', '.join(parts)})"


ScopePath = tuple[Scope, ...]
"""The scopes around an op, outermost first; empty for an op under none."""
