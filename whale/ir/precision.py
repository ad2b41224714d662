"""In which types ops compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from whale.ir.patterns import first_match, idle_patterns


@dataclass(frozen=True, slots=True)
class Precision:
    """The type that ops compute in where autocast casts, and the parameters whose ops do not.

    Attributes:
        dtype: name of the type (``bfloat16``).
        by_name: patterns of parameter names, each with whether what reads such a parameter computes in float32; the first that matches
            says it. Empty: nothing does.
    """

    dtype: str
    by_name: tuple[tuple[str, bool], ...] = ()

    def keeps(self, name: str) -> bool:
        """Whether ops that read a parameter compute in float32."""
        return dict(self.by_name).get(first_match(self._patterns, name) or "", False)

    def idle_patterns(self, names: Iterable[str]) -> list[str]:
        """The patterns that are the first to match none of these names; the last, for all others, may be."""
        return idle_patterns(self._patterns, names)

    @property
    def _patterns(self) -> list[str]:
        return [pattern for pattern, _ in self.by_name]
