"""Which part of every parameter each rank holds, and whose gradients make up the whole.

Holders of a parameter need not agree: one replica may cut it 3:1, another 2:2, a third not at all. The parameter falls
into pieces at all their bounds; every piece has one set of owners, and is synchronised among them:

    replica 0   |--- rank 0 ---|-- rank 1 --|
    replica 1   |-- rank 2 --|--- rank 3 ---|
    pieces      |   {0, 2}   |{0,3}| {1, 3} |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from torch import Tensor

from whale.axes import Axes, discover
from whale.axes.values import Dimension, may_lie_in_parts
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Stage
from whale.runtime.program.shard.pieces import Index, as_index, axis_sizes, part
from whale.sharding import Region
from whale.sharding.index_sets import Runs, index_set, intervals

Partial = Mapping[tuple[int, int], Collection[str]]
"""Per (replica, stage), the whole parameters whose gradients are partial over the devices of a split group."""


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that the same ranks hold.

    Attributes:
        name: of the parameter.
        region: interval of each cut axis.
        owners: ranks of the plan that hold it, ascending.
        contributors: those of them whose gradients are to be added; the others hold copies of the same gradient.
        is_complete: whether every owner has the whole gradient already.
    """

    name: str
    region: Region
    owners: tuple[int, ...]
    contributors: frozenset[int]
    is_complete: bool


@dataclass(frozen=True)
class Holdings:
    """What all ranks hold.

    Attributes:
        plan: who holds which parameters.
        axes: of the model; None where no stage is cut.
        partial: from the programs of the split stages.
    """

    plan: Plan
    axes: Axes | None
    partial: Partial

    @cached_property
    def regions(self) -> dict[str, dict[int, Region]]:
        """Per parameter and rank of the plan, what it holds.

        Raises:
            PlanError: two stages of one device hold a parameter in different parts.
        """
        found: dict[str, dict[int, Region]] = {}
        for stage, rank, position, _ in self._seats():
            for name in stage.parameters:
                region = self._region(stage, position, name)
                before = found.setdefault(name, {}).setdefault(rank, region)
                if before != region:
                    raise PlanError(f"a device holds one part of a parameter ({name} on {self.plan.devices[rank]}: {before} and {region})")
        return found

    def _seats(self) -> Iterable[tuple[Stage, int, int, tuple[int, int, int]]]:
        """Per stage and device: the stage, its rank, its position in its split group, and which group that is."""
        for replica in self.plan.replicas:
            for stage in replica.stages:
                for index, device in enumerate(stage.virtual_device.devices):
                    group, position = divmod(index, stage.split)
                    yield stage, self.plan.rank_of[device], position, (replica.index, stage.index, group)

    def _region(self, stage: Stage, position: int, name: str) -> Region:
        if not stage.shards:
            return Region()
        held = intervals([shard for shard in stage.shards if name not in shard.whole_parameters], position)
        mine = [axis for axis in held if axis != BATCH and may_lie_in_parts(self.dimensions(name), axis)]
        return Region(tuple((axis, *held[axis]) for axis in sorted(mine)))

    def dimensions(self, name: str) -> tuple[Dimension, ...]:
        """The axes of a parameter's dimensions; none are known of one that no op reads."""
        return () if self.axes is None else self.axes.parameters.get(name, ())

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {} if self.axes is None else axis_sizes(self.axes)

    def is_sharded(self, name: str) -> bool:
        """Whether some rank holds only a part."""
        return any(region.intervals for region in self.regions[name].values())

    def index(self, name: str, region: Region, within: Region = Region()) -> tuple[Index, ...] | None:  # noqa: B008
        """Where a region lies in a tensor that holds another one (by default the whole parameter); None for all of it."""
        if region == within:
            return None
        outer = {axis: (start, stop) for axis, start, stop in within.intervals}
        sizes = self._sizes | {axis: stop - start for axis, (start, stop) in outer.items()}
        held = {axis: (start - outer.get(axis, (0, 0))[0], stop - outer.get(axis, (0, 0))[0]) for axis, start, stop in region.intervals}
        return tuple(as_index(index_set(dimension, sizes, held)) for dimension in self.dimensions(name))

    def runs(self, name: str, region: Region) -> tuple[Runs, ...]:
        """Per dimension of a parameter of known axes, the positions that a region takes."""
        held = {axis: (start, stop) for axis, start, stop in region.intervals}
        return tuple(index_set(dimension, self._sizes, held) for dimension in self.dimensions(name))

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """The pieces of a parameter, in order."""
        regions = self.regions[name]
        bounds: dict[str, set[int]] = {}
        for region in regions.values():
            for axis, start, stop in region.intervals:
                bounds.setdefault(axis, {0, self._sizes[axis]}).update((start, stop))
        grid = [[(axis, *pair) for pair in zip(sorted(ends), sorted(ends)[1:], strict=False)] for axis, ends in sorted(bounds.items())]
        return tuple(self._piece(name, Region(tuple(box))) for box in product(*grid))

    def num_elements(self, piece: Piece, shape: Sequence[int]) -> int:
        """Elements of a piece of a parameter of this (whole) shape."""
        index = self.index(piece.name, piece.region)
        if index is None:
            return prod(shape)
        return prod(place.stop - place.start if isinstance(place, slice) else len(place) for place in index)

    def cut_out(self, name: str, rank: int, whole: Tensor) -> Tensor:
        """The part of a parameter or buffer that a rank holds; a view of it where that can be."""
        index = self.index(name, self.regions[name][rank])
        return whole if index is None else part(whole, index)

    def answered_for(self, name: str, rank: int) -> tuple[tuple[Index, ...] | None, ...]:
        """Where the pieces that a rank is the lowest owner of lie in what it holds of a parameter; None for all of it."""
        held = self.regions[name][rank]
        return tuple(self.index(name, piece.region, held) for piece in self.pieces(name) if piece.owners[0] == rank)

    def _piece(self, name: str, region: Region) -> Piece:
        owners = tuple(sorted(rank for rank, held in self.regions[name].items() if _covers(held, region)))
        contributors: dict[tuple[int, int, int], set[int]] = {}
        is_partial = False
        for stage, rank, position, group in self._seats():
            if name not in stage.parameters or rank not in owners:
                continue
            copies = stage.split > 1 and not self.regions[name][rank].intervals and name not in self.partial.get(group[:2], ())
            is_partial = is_partial or not copies
            if position == 0 or not copies:
                contributors.setdefault(group, set()).add(rank)
        adding = [rank for ranks in contributors.values() for rank in ranks]
        return Piece(name, region, owners, frozenset(adding), len(owners) == 1 or (len(adding) == 1 and not is_partial))


def _covers(outer: Region, inner: Region) -> bool:
    for axis, start, stop in outer.intervals:
        interval = inner.interval(axis)
        if interval is None or interval[0] < start or interval[1] > stop:
            return False
    return True


def discover_if_sharded(plan: Plan, model: ModelGraph) -> Axes | None:
    """The axes of a model, where some stage of the plan is cut; otherwise nobody needs them."""
    is_sharded = any(stage.shards for replica in plan.replicas for stage in replica.stages)
    return discover(model) if is_sharded else None
