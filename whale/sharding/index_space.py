"""Where the elements of a region lie in a tensor: the positions per dimension, by the axes that each dimension is made of.

[3*heads*width]  fused projection, region heads[1:2] of heads 2, width 2      (2, 4) (6, 8) (10, 12)
[rows seq]       region batch[3:5] of a tensor that holds batch[2:6]           (1, 3) | (0, seq)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from whale.axes.values import Dimension
from whale.sharding.index_sets import Runs, count, index_set
from whale.sharding.regions import Region


@dataclass(frozen=True)
class IndexSpace:
    """The dimensions of a whole tensor.

    Attributes:
        dimensions: as products of axes.
        sizes: of the axes; of the batch, the rows at hand.
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
