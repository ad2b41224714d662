"""Where the elements of a tensor live, and the copies that turn one layout into another.

A layout gives every device of a virtual device a region: an interval of each cut axis. Axes that a region does
not name are whole. Bridges, gradient synchronisation and checkpoints all follow from intersecting regions.

         source (5:3)        target (4:4)            transfers
    a0  [0 1 2 3 4]      b0 [0 1 2 3]           a0 -> b0  [0, 4)
    a1  [5 6 7]          b1 [4 5 6 7]           a0 -> b1  [4, 5)
                                                a1 -> b1  [5, 8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Region:
    """A product of half-open intervals, one per cut axis, as sorted ``(axis, start, stop)``."""

    intervals: tuple[tuple[str, int, int], ...] = ()

    def interval(self, axis: str) -> tuple[int, int] | None:
        """The interval on an axis; None where the axis is whole."""
        for name, start, stop in self.intervals:
            if name == axis:
                return start, stop
        return None

    @property
    def is_empty(self) -> bool:
        return any(start >= stop for _, start, stop in self.intervals)

    def intersect(self, other: Region) -> Region:
        """The elements that both hold."""
        merged = {axis: (start, stop) for axis, start, stop in self.intervals}
        for axis, start, stop in other.intervals:
            low, high = merged.get(axis, (start, stop))
            merged[axis] = max(low, start), min(high, stop)
        return Region(tuple((axis, *merged[axis]) for axis in sorted(merged)))

    def __str__(self) -> str:
        return " ".join(f"{axis}[{start}:{stop}]" for axis, start, stop in self.intervals) or "whole"


@dataclass(frozen=True, slots=True)
class Layout:
    """One region per device of a virtual device, in its order.

    `partial` marks values that are sums still to be added over the devices.
    """

    regions: tuple[Region, ...]
    partial: bool = False

    @staticmethod
    def whole(num_devices: int) -> Layout:
        """Every device holds everything."""
        return Layout((Region(),) * num_devices)

    @staticmethod
    def shard(axis: str, sizes: Sequence[int]) -> Layout:
        """The axis divided in consecutive intervals of these sizes."""
        regions, start = [], 0
        for size in sizes:
            regions.append(Region(((axis, start, start + size),)))
            start += size
        return Layout(tuple(regions))

    def __str__(self) -> str:
        return ("partial " if self.partial else "") + " | ".join(str(region) for region in self.regions)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A region copied from one device of the source to one device of the target, both by position."""

    source: int
    target: int
    region: Region


def transfers(source: Layout, target: Layout) -> tuple[Transfer, ...]:
    """The copies that give every target device its region, each element from exactly one source.

    Both layouts hold final values. Where several source devices hold an element, target `j` prefers the
    source at its own position in proportion, so that copies spread; each target receives every element once,
    hence each target's gradient returns to exactly one source.

    Cut axes must be divided in full by the source: for one axis, its distinct intervals tile it.
    """
    assert not source.partial and not target.partial
    result: list[Transfer] = []
    num_sources, num_targets = len(source.regions), len(target.regions)
    for j, wanted in enumerate(target.regions):
        preferred = j * num_sources // num_targets
        order = sorted(range(num_sources), key=lambda i: (abs(i - preferred), i))
        taken: set[Region] = set()
        copies = []
        for i in order:
            common = source.regions[i].intersect(wanted)
            if common.is_empty or source.regions[i] in taken:
                continue
            taken.add(source.regions[i])
            copies.append(Transfer(i, j, common))
        result += sorted(copies, key=lambda t: (t.source, t.region.intervals))
    return tuple(result)
