"""Index sets: which positions of each dimension of a tensor a region covers, as sorted runs.

A dimension is a product of axes, outermost first, so a part of an inner axis is a comb:

    heads*width, heads 4 of which the device holds 1..2, width 3      [. . . x x x x x x . . .]   one run
    three*heads, three 3                                              [. x x . . x x . . x x .]   three runs
    (q | k | v), pieces of different sizes                            each piece has runs of its own

The units of a folded axis are counted from both ends in turn, so that a part of it has elements from both, and parts of equal
sizes have equal work where that grows with the position (a causal mask):

    units     0 2 4 6 7 5 3 1
    parts     0 0 1 1 1 1 0 0      of 4 units each, two runs and one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from whale.axes.values import Axes, Concatenation, Dimension, Factor
from whale.ir.plan import Shard
from whale.sharding.sharding import Region

Runs = tuple[tuple[int, int], ...]
"""Positions as runs ``[start, stop)``: sorted, not empty, not adjacent."""


def intervals(shards: Sequence[Shard], position: int) -> dict[str, tuple[int, int]]:
    """Per cut axis, the interval that the device at this position of its split group holds."""
    found = {}
    for shard in shards:
        ends = (0, *accumulate(shard.sizes))
        found[shard.axis] = (ends[position], ends[position + 1])
    return found


def axis_sizes(axes: Axes) -> dict[str, int]:
    """Sizes of all axes, at the example's rows."""
    return {axis.name: axis.size for axis in axes.axes}


def extent(dimension: Dimension, sizes: Mapping[str, int]) -> int:
    """The size of a dimension, from the sizes of its axes."""
    return prod(_extent(factor, sizes) for factor in dimension)


def _extent(factor: Factor, sizes: Mapping[str, int]) -> int:
    if isinstance(factor, Concatenation):
        return sum(extent(piece, sizes) for piece in factor.pieces)
    return sizes[factor]


def index_set(dimension: Dimension, sizes: Mapping[str, int], held: Mapping[str, tuple[int, int]], folded: Set[str] = frozenset()) -> Runs:
    """The positions of a dimension that a device holds, from the interval `held` of each cut axis."""
    runs: Runs = ((0, 1),)
    size = 1
    for factor in reversed(dimension):
        runs = _product(_runs_of(factor, sizes, held, folded), runs, size)
        size *= _extent(factor, sizes)
    return runs


def _runs_of(factor: Factor, sizes: Mapping[str, int], held: Mapping[str, tuple[int, int]], folded: Set[str]) -> Runs:
    if not isinstance(factor, Concatenation):
        start, stop = held.get(factor, (0, sizes[factor]))
        if factor in folded:
            size = sizes[factor]
            return merged((((start + 1) // 2, (stop + 1) // 2), (size - stop // 2, size - start // 2)))
        return ((start, stop),) if start < stop else ()
    found: list[tuple[int, int]] = []
    offset = 0
    for piece in factor.pieces:
        found += [(offset + start, offset + stop) for start, stop in index_set(piece, sizes, held, folded)]
        offset += extent(piece, sizes)
    return merged(found)


def _product(outer: Runs, inner: Runs, size: int) -> Runs:
    """Positions ``o * size + i`` for o and i in the sets."""
    if inner == ((0, size),):
        return tuple((start * size, stop * size) for start, stop in outer)
    return merged((o * size + start, o * size + stop) for first, last in outer for o in range(first, last) for start, stop in inner)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The runs, given in order, with adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def count(runs: Runs) -> int:
    """The number of positions."""
    return sum(stop - start for start, stop in runs)


def count_below(runs: Runs, bound: int) -> int:
    """The number of positions below `bound`: where a slice of the whole begins in the part."""
    return sum(min(stop, bound) - start for start, stop in runs if start < bound)


def relative(runs: Runs, within: Runs) -> Runs:
    """Positions of a subset, counted within the set: a slice of the whole as places in a part."""
    found, done, place = [], 0, 0
    for start, stop in runs:
        while within[place][1] < stop:  # each run of the subset is in one of the set
            done += within[place][1] - within[place][0]
            place += 1
        first = done + start - within[place][0]
        found.append((first, first + stop - start))
    return merged(found)


@dataclass(frozen=True)
class IndexSpace:
    """The dimensions of a whole tensor as products of axes, and the sizes of the axes; of the batch, the device's rows."""

    dimensions: tuple[Dimension, ...]
    sizes: Mapping[str, int]
    folded: frozenset[str] = frozenset()  # the axes whose units are counted from both ends

    def positions(self, region: Region, within: Region = Region()) -> tuple[Runs, ...]:  # noqa: B008
        """Per dimension, the positions of a region in the tensor of a device that holds `within`, which contains it."""
        if not self.folded.isdisjoint(region.axes):
            return tuple(map(relative, self._runs(region), self._runs(within)))
        outer = _held(within)
        sizes = {**self.sizes, **{axis: stop - start for axis, (start, stop) in outer.items()}}
        held = {axis: (start - outer.get(axis, (0, 0))[0], stop - outer.get(axis, (0, 0))[0]) for axis, start, stop in region.intervals}
        return tuple(index_set(dimension, sizes, held) for dimension in self.dimensions)

    def _runs(self, region: Region) -> tuple[Runs, ...]:
        held = _held(region)
        return tuple(index_set(dimension, self.sizes, held, self.folded) for dimension in self.dimensions)

    def shape(self, region: Region) -> tuple[int, ...]:
        """The shape of the tensor of a device that holds a region."""
        return tuple(map(count, self.positions(region)))

    def num_elements(self, region: Region) -> int:
        return prod(self.shape(region))


def _held(region: Region) -> dict[str, tuple[int, int]]:
    return {axis: (start, stop) for axis, start, stop in region.intervals}
