"""An annotation as the user wrote it: `replicate` or `split`, its line, and how scopes nest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code; prints as ``file:line``."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


ScopeKind = Literal["replicate", "split"]


@dataclass(frozen=True, slots=True)
class Scope:
    """One entry of a ``with whale.replicate(...)`` or ``with whale.split(...)``."""

    kind: ScopeKind  # ``replicate`` cuts the batch axis, ``split`` cuts another one
    device_count: int | None  # devices (for an enclosing scope: copies); None lets the planner choose
    name: str | None  # the user's name; entries of one explicit name are one TaskGraph
    axis: str | None  # required by a `split`
    where: SourceLine | None  # the user's line
    entry: int  # number in order of entry; distinguishes unnamed scopes
    is_default: bool = False  # the scope came from `whale.set_default_strategy`

    @property
    def key(self) -> str:
        """Equal for entries of one TaskGraph: the explicit name, else the entry number."""
        return self.name if self.name is not None else f"{self.kind}#{self.entry}"

    def __str__(self) -> str:
        count = "" if self.device_count is None else str(self.device_count)
        parts = [part for part in (count, f"name={self.name!r}" if self.name else "", f"axis={self.axis!r}" if self.axis else "") if part]
        return f"{self.kind}({', '.join(parts)})"


ScopePath = tuple[Scope, ...]  # the scopes around an op, outermost first; empty for none
