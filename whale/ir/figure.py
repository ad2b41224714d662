"""One measured figure: its median and spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whale.units import format_quantity

NOISY = 0.25  # spread above which a figure is warned about: predictions may be as far off


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure."""

    name: str  # of what, in words (``host0 cpu: products of float32, 1024 x 1024``)
    unit: str  # ``FLOP/s``, ``B/s`` or ``s``
    value: float  # the median
    low: float  # the lower quartile
    high: float  # the upper quartile
    num_samples: int

    @staticmethod
    def of(name: str, unit: str, samples: Sequence[float]) -> Figure:
        """The figure of one or more measurements."""
        assert min(samples) > 0, "what was measured takes time"
        middle = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (middle,) * 3
        return Figure(name, unit, middle, low, high, len(samples))

    @property
    def spread(self) -> float:
        """The distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / self.value

    def __str__(self) -> str:
        quartiles = f"quartiles {format_quantity(self.low, self.unit)} to {format_quantity(self.high, self.unit)}"
        scatter = "1 sample" if self.num_samples == 1 else f"{quartiles} of {self.num_samples} samples"
        return f"{self.name}: {format_quantity(self.value, self.unit)} ({scatter})"


NAMED = 3  # noisy figures in a warning


def noise(figures: Iterable[Figure]) -> str:
    """A warning that names the worst of the figures with a spread above `NOISY`; empty if there are none."""
    found = sorted((each for each in figures if each.spread > NOISY), key=lambda each: -each.spread)
    if not found:
        return ""
    named = ", ".join(str(each) for each in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"measured figures vary by more than {NOISY:.0%}: {named}{more}; measure again while nothing else runs"
