"""Index sets: which positions of a tensor dimension one device holds, as sorted runs.

A dimension is a product of axes, outermost first, so a part of an axis inside it is a comb:

    heads*width, heads 4 of which the device holds 1..2, width 3      [. . . x x x x x x . . .]   one run
    three*heads, three 3                                              [. x x . . x x . . x x .]   three runs
    (q | k | v), pieces of unlike sizes                               each piece has runs of its own

Where the elements of a region lie in a tensor: the positions per dimension, by the axes that each dimension is made of.

[3*heads*width]  fused projection, region heads[1:2] of heads 2, width 2      (2, 4) (6, 8) (10, 12)
[rows seq]       region batch[3:5] of a tensor that holds batch[2:6]           (1, 3) | (0, seq)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from whale.axes.values import Concatenation, Dimension, Factor
from whale.ir.plan import Shard
from whale.sharding.sharding import Region

Runs = tuple[tuple[int, int], ...]
"""Positions as runs ``[start, stop)``, sorted, none empty, none touching the next."""


def intervals(shards: Sequence[Shard], position: int) -> dict[str, tuple[int, int]]:
    """Per cut axis, the interval of it that the device at this position of its split group holds."""
    found = {}
    for shard in shards:
        ends = (0, *accumulate(shard.sizes))
        found[shard.axis] = (ends[position], ends[position + 1])
    return found


def extent(dimension: Dimension, sizes: Mapping[str, int]) -> int:
    """The size of a dimension.

    Args:
        dimension: a product of axes.
        sizes: of the axes.
    """
    return prod(_extent(factor, sizes) for factor in dimension)


def _extent(factor: Factor, sizes: Mapping[str, int]) -> int:
    if isinstance(factor, Concatenation):
        return sum(extent(piece, sizes) for piece in factor.pieces)
    return sizes[factor]


def index_set(dimension: Dimension, sizes: Mapping[str, int], held: Mapping[str, tuple[int, int]]) -> Runs:
    """The positions of a dimension that a device holds.

    Args:
        dimension: a product of axes.
        sizes: of the axes.
        held: per cut axis, the interval that the device holds.
    """
    runs: Runs = ((0, 1),)
    size = 1
    for factor in reversed(dimension):
        runs = _product(_runs_of(factor, sizes, held), runs, size)
        size *= _extent(factor, sizes)
    return runs


def _runs_of(factor: Factor, sizes: Mapping[str, int], held: Mapping[str, tuple[int, int]]) -> Runs:
    if not isinstance(factor, Concatenation):
        start, stop = held.get(factor, (0, sizes[factor]))
        return ((start, stop),) if start < stop else ()
    found: list[tuple[int, int]] = []
    offset = 0
    for piece in factor.pieces:
        found += [(offset + start, offset + stop) for start, stop in index_set(piece, sizes, held)]
        offset += extent(piece, sizes)
    return merged(found)


def _product(outer: Runs, inner: Runs, size: int) -> Runs:
    """Positions ``o * size + i`` for o and i in the sets."""
    if inner == ((0, size),):
        return tuple((start * size, stop * size) for start, stop in outer)
    return merged((o * size + start, o * size + stop) for first, last in outer for o in range(first, last) for start, stop in inner)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs in order, those that touch joined."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def count(runs: Runs) -> int:
    """How many positions there are."""
    return sum(stop - start for start, stop in runs)


def count_below(runs: Runs, bound: int) -> int:
    """How many of the positions come before `bound`: where a slice of the whole begins in the part."""
    return sum(min(stop, bound) - start for start, stop in runs if start < bound)


def relative(runs: Runs, within: Runs) -> Runs:
    """Positions that lie in a set, counted among its own: what is asked for of a part, as places in that part."""
    return merged((count_below(within, start), count_below(within, stop)) for start, stop in runs)


@dataclass(frozen=True)
class IndexSpace:
    """The dimensions of a whole tensor.

    Attributes:
        dimensions: as products of axes.
        sizes: of the axes; of the batch, the device's rows.
    """

    dimensions: tuple[Dimension, ...]
    sizes: Mapping[str, int]

    def positions(self, region: Region, within: Region = Region()) -> tuple[Runs, ...]:  # noqa: B008
        """Per dimension, where a region lies in the tensor of a device that holds another one (by default, in the whole tensor).

        Args:
            region: of which it holds all.
            within: what the device holds.
        """
        outer = {axis: (start, stop) for axis, start, stop in within.intervals}
        sizes = {**self.sizes, **{axis: stop - start for axis, (start, stop) in outer.items()}}
        held = {axis: (start - outer.get(axis, (0, 0))[0], stop - outer.get(axis, (0, 0))[0]) for axis, start, stop in region.intervals}
        return tuple(index_set(dimension, sizes, held) for dimension in self.dimensions)

    def shape(self, region: Region) -> tuple[int, ...]:
        """The shape of the tensor of a device that holds a region."""
        return tuple(map(count, self.positions(region)))

    def num_elements(self, region: Region) -> int:
        """Elements of a region."""
        return prod(self.shape(region))
