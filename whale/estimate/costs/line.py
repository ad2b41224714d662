"""A quantity that grows with the rows of a batch: seconds or bytes as ``fixed + per_row x rows``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + per_row x rows``, in seconds or bytes."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, num_rows: float) -> float:
        """The value at a number of rows."""
        return self.fixed + self.per_row * num_rows

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.per_row + other.per_row)

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.per_row * factor)

    @staticmethod
    def sum(lines: Iterable[Line]) -> Line:
        """The sum of lines; zero of none."""
        fixed = per_row = 0.0
        for line in lines:
            fixed += line.fixed
            per_row += line.per_row
        return Line(fixed, per_row)

    @staticmethod
    def largest(lines: Iterable[Line]) -> Line:
        """A line that none of them is above; zero where there are none."""
        given = list(lines)
        return Line(max((line.fixed for line in given), default=0.0), max((line.per_row for line in given), default=0.0))
