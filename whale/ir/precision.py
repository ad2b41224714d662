"""The dtypes in which ops compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from whale.ir.patterns import first_match, idle_patterns

HALVES = ("bfloat16", "float16")

HALF = "bfloat16"
"""Stands in a graph for the half-precision dtype of each device, where devices have their own (`ModelGraph.half_by_device`)."""

OWN_HALF = "half"
"""Its name in tables of costs: each device has a speed of its own for it."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype to which autocast casts, and the parameters whose ops are excluded."""

    dtype: str  # name (``bfloat16``)
    # patterns of parameter names, each with whether the readers of such a parameter compute in float32; the first match counts
    by_name: tuple[tuple[str, bool], ...] = ()
    by_device: bool = False  # whether each device has a half-precision type of its own, and `dtype` is that of the one at hand

    def keeps(self, name: str) -> bool:
        """Whether ops that read a parameter compute in float32."""
        return dict(self.by_name).get(first_match(self._patterns, name) or "", False)

    def idle_patterns(self, names: Iterable[str]) -> list[str]:
        return idle_patterns(self._patterns, names)

    @property
    def _patterns(self) -> list[str]:
        return [pattern for pattern, _ in self.by_name]
