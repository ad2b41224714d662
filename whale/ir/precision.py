"""The dtypes in which ops compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from whale.ir.patterns import first_match, idle_patterns


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype to which autocast casts, and the parameters whose ops are excluded."""

    dtype: str  # name (``bfloat16``)
    # patterns of parameter names, each with whether the readers of such a parameter compute in float32; the first match counts
    by_name: tuple[tuple[str, bool], ...] = ()

    def keeps(self, name: str) -> bool:
        """Whether ops that read a parameter compute in float32."""
        return dict(self.by_name).get(first_match(self._patterns, name) or "", False)

    def idle_patterns(self, names: Iterable[str]) -> list[str]:
        return idle_patterns(self._patterns, names)

    @property
    def _patterns(self) -> list[str]:
        return [pattern for pattern, _ in self.by_name]
