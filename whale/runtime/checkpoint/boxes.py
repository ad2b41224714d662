"""Where a rank's part of a tensor lies in the whole one, as rectangles: the units in which a checkpoint is written and read.

fused projection, 2 heads of 2 columns in each of q, k, v; this rank holds head 1

whole       q q Q Q k k K K v v V V         held  ((2, 4), (6, 8), (10, 12)) in that dimension
local           0 1     2 3     4 5         three boxes, each an interval of the whole and of the local tensor
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

from torch import Tensor

from whale.ir.graph import ModelGraph
from whale.runtime.state.holdings import Holdings
from whale.sharding.index_sets import Runs, count


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: per dimension its first position, and the one after its last."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    def of(self, tensor: Tensor) -> Tensor:
        for dim, (start, stop) in enumerate(zip(self.start, self.stop, strict=True)):
            tensor = tensor.narrow(dim, start, stop - start)
        return tensor

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Itself, counted from another position."""
        return Box(_less(self.start, origin), _less(self.stop, origin))


@dataclass(frozen=True)
class Share:
    """A rank's part of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    held: tuple[Runs, ...]  # per dimension, the positions held, in the order of the rank's own tensor
    written: tuple[tuple[Runs, ...], ...] = ()  # per piece that the rank writes, its positions per dimension

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(map(count, self.held))

    def written_boxes(self) -> Iterator[Box]:
        """What the rank writes, as rectangles of the whole tensor."""
        for piece in self.written:
            yield from boxes(piece)

    def local(self, box: Box) -> Box:
        """Where the part of a rectangle of the whole that is held lies in the rank's own tensor: adjacent, whatever lies between."""
        start = tuple(line.count_below(bound) for line, bound in zip(self._lines, box.start, strict=True))
        return Box(start, tuple(line.count_below(bound) for line, bound in zip(self._lines, box.stop, strict=True)))

    def overlap(self, box: Box) -> tuple[Runs, ...] | None:
        """Per dimension, the held positions of a rectangle of the whole; None where there are none."""
        ends = zip(box.start, box.stop, strict=True)
        found = tuple(line.within(start, stop) for line, (start, stop) in zip(self._lines, ends, strict=True))
        return found if all(found) else None

    @cached_property
    def _lines(self) -> tuple[_Line, ...]:
        return tuple(map(_Line, self.held))


class _Line:
    """Runs that are asked often: a comb may have thousands, and a checkpoint as many pieces."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._starts = [start for start, _ in runs]
        self._counts = [0, *accumulate(stop - start for start, stop in runs)]

    def count_below(self, bound: int) -> int:
        """How many positions come before `bound`."""
        number = bisect_left(self._starts, bound)
        beyond = max(self._runs[number - 1][1] - bound, 0) if number else 0
        return self._counts[number] - beyond

    def within(self, start: int, stop: int) -> Runs:
        first = max(bisect_right(self._starts, start) - 1, 0)
        near = self._runs[first : bisect_left(self._starts, stop)]
        clipped = ((max(start, low), min(stop, high)) for low, high in near)
        return tuple((low, high) for low, high in clipped if low < high)


def boxes(positions: Sequence[Runs]) -> Iterator[Box]:
    """The rectangles that a product of runs is made of."""
    for corner in product(*positions):
        yield Box(tuple(start for start, _ in corner), tuple(stop for _, stop in corner))


def find_shares(
    holdings: Holdings,
    rank: int | None,
    model: ModelGraph,
    *,
    writes_all: bool = False,
    chosen: Mapping[str, Collection[int]] | None = None,
) -> dict[str, Share]:
    """What a rank holds of the parameters and buffers that some rank holds only a part of.

    Args:
        holdings: who holds which part.
        rank: of the plan; None if idle.
        model: shapes.
        writes_all: whether it writes all pieces that it holds; else those of which it is the lowest owner.
        chosen: in their place, the numbers of the pieces that it writes, by name.
    """
    found: dict[str, Share] = {}
    shardings = holdings.shardings
    if rank is None:
        return found
    for name in shardings.parameters:
        sharding = shardings.kept(name)
        if rank in sharding.held and sharding.is_sharded:
            space, pieces = shardings.space(name), sharding.pieces
            if chosen is None:
                own = [piece for piece in pieces if rank in piece.owners[: None if writes_all else 1]]
            else:
                own = [pieces[number] for number in chosen.get(name, ())]
            shape, written = model.parameter_by_name[name].spec.shape, tuple(space.positions(piece.region) for piece in own)
            found[name] = Share(shape, space.positions(sharding.held[rank]), written)
    return found


def _less(positions: Sequence[int], origin: Sequence[int]) -> tuple[int, ...]:
    return tuple(position - zero for position, zero in zip(positions, origin, strict=True))
