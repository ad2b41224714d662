"""A quantity that is linear in the rows of a batch, and a pass on its device and its host.

The host starts kernels and messages ahead, so a pass takes the longer of the two:

host      | start | start | start | start |
device       [kernel] [message] [kernel]   [kernel]     here the host limits
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + per_row x rows``, in seconds or bytes."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, num_rows: float) -> float:
        return self.fixed + self.per_row * num_rows

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.per_row + other.per_row)

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.per_row * factor)

    @staticmethod
    def sum(lines: Iterable[Line]) -> Line:
        fixed = per_row = 0.0
        for line in lines:
            fixed += line.fixed
            per_row += line.per_row
        return Line(fixed, per_row)

    @staticmethod
    def largest(lines: Iterable[Line]) -> Line:
        """An upper bound of all lines; zero of none."""
        given = list(lines)
        return Line(max((line.fixed for line in given), default=0.0), max((line.per_row for line in given), default=0.0))


@dataclass(frozen=True, slots=True)
class Started:
    """A pass: seconds of its kernels and messages on the device, and of starting them on the host (independent of rows)."""

    device: Line = field(default_factory=Line)
    host: float = 0.0

    def __add__(self, other: Started) -> Started:
        """Both as one pass: the host runs ahead from the first into the second."""
        return Started(self.device + other.device, self.host + other.host)

    def __mul__(self, count: float) -> Started:
        return Started(self.device * count, self.host * count)

    def waiting(self, rows: Floats) -> Floats:
        """Seconds that the device waits for its host, by rows."""
        found: Floats = np.maximum(self.host - self.device.fixed - self.device.per_row * rows, 0.0)
        return found

    def line(self, num_rows: float) -> Line:
        """Seconds of the pass as a line about a number of rows."""
        return self.device + Line(max(0.0, self.host - self.device.at(num_rows)))
