"""A region: the product of intervals of logical axes that one device holds of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Region:
    """A product of half-open intervals, one per sharded axis, as sorted ``(axis, start, stop)``; an axis it does not name is whole."""

    intervals: tuple[tuple[str, int, int], ...] = ()

    @staticmethod
    def of(held: Mapping[str, tuple[int, int]]) -> Region:
        """The region with these intervals."""
        return Region(tuple((axis, *held[axis]) for axis in sorted(held)))

    def interval(self, axis: str) -> tuple[int, int] | None:
        """The interval on an axis; None where the axis is whole."""
        for name, start, stop in self.intervals:
            if name == axis:
                return start, stop
        return None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that it names."""
        return tuple(axis for axis, _, _ in self.intervals)

    @property
    def is_empty(self) -> bool:
        return any(start >= stop for _, start, stop in self.intervals)

    @property
    def volume(self) -> int:
        """Units of the axes that it names, multiplied: what regions of one tensor are compared by."""
        return prod(max(0, stop - start) for _, start, stop in self.intervals)

    def intersect(self, other: Region) -> Region:
        """The elements that both hold."""
        if self == other:
            return self
        merged = {axis: (start, stop) for axis, start, stop in self.intervals}
        for axis, start, stop in other.intervals:
            low, high = merged.get(axis, (start, stop))
            merged[axis] = max(low, start), min(high, stop)
        return Region.of(merged)

    def contains(self, other: Region) -> bool:
        """Whether it holds all of another region, which names every axis that it names."""
        held = {axis: (start, stop) for axis, start, stop in other.intervals}
        return all(axis in held and start <= held[axis][0] and held[axis][1] <= stop for axis, start, stop in self.intervals)

    def without(self, other: Region) -> Iterator[Region]:
        """What is left of it, in disjoint regions, when another is taken away; it names every axis that the other names."""
        common = self.intersect(other)
        if common.is_empty:
            yield self
            return
        rest = {axis: (start, stop) for axis, start, stop in self.intervals}
        for axis, start, stop in common.intervals:
            low, high = rest[axis]
            for side in ((low, start), (stop, high)):
                if side[0] < side[1]:
                    yield Region.of({**rest, axis: side})
            rest[axis] = start, stop

    def __str__(self) -> str:
        return " ".join(f"{axis}[{start}:{stop}]" for axis, start, stop in self.intervals) or "whole"
