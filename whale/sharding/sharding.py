"""A sharding: which elements of a tensor each device of a mesh holds, and which of them are still to be added.

    mesh      0            1            2            3
    region    heads[0:3]   heads[3:4]   heads[0:2]   heads[2:4]      two groups that shard one axis in different sizes
    term      0            1            2            3               gradients: each device has a sum over its own rows

Devices with overlapping regions hold the same elements. With equal terms these are copies; with different terms the value
is the sum over the terms, one copy of each. A term is zero where no device holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from whale.ir.division import intervals


@dataclass(frozen=True, slots=True)
class Region:
    """A product of half-open intervals, one per sharded axis, as sorted ``(axis, start, stop)``; other axes are whole."""

    intervals: tuple[tuple[str, int, int], ...] = ()

    @staticmethod
    def of(held: Mapping[str, tuple[int, int]]) -> Region:
        return Region(tuple((axis, *held[axis]) for axis in sorted(held)))

    def interval(self, axis: str) -> tuple[int, int] | None:
        """None where the axis is whole."""
        for name, start, stop in self.intervals:
            if name == axis:
                return start, stop
        return None

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _, _ in self.intervals)

    @property
    def is_empty(self) -> bool:
        return any(start >= stop for _, start, stop in self.intervals)

    @property
    def volume(self) -> int:
        """Product of the interval lengths; compares regions of one tensor."""
        return prod(max(0, stop - start) for _, start, stop in self.intervals)

    def intersect(self, other: Region) -> Region:
        if self == other:
            return self
        merged = {axis: (start, stop) for axis, start, stop in self.intervals}
        for axis, start, stop in other.intervals:
            low, high = merged.get(axis, (start, stop))
            merged[axis] = max(low, start), min(high, stop)
        return Region.of(merged)

    def contains(self, other: Region) -> bool:
        """Whether it contains a region that names at least its axes."""
        held = {axis: (start, stop) for axis, start, stop in other.intervals}
        return all(axis in held and start <= held[axis][0] and held[axis][1] <= stop for axis, start, stop in self.intervals)

    def without(self, other: Region) -> Iterator[Region]:
        """The rest, in disjoint regions, when another is taken away whose axes this one names too."""
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


@dataclass(frozen=True)
class Piece:
    """Elements held by the same devices."""

    region: Region
    owners: tuple[int, ...]  # the devices that hold them, ascending
    contributors: frozenset[int]  # one owner per term: those whose values are added

    @property
    def is_complete(self) -> bool:
        """Whether every owner has the whole value already."""
        return len(self.contributors) == 1


@dataclass(frozen=True)
class Sharding:
    """Where a tensor is held."""

    mesh: tuple[int, ...]  # the devices, each once
    regions: tuple[Region, ...]  # per device. All name the same axes, and together they cover the tensor
    terms: tuple[int, ...] = ()  # per device, the term of the sum that its values belong to; empty where they are final

    def __post_init__(self) -> None:
        assert len({region.axes for region in set(self.regions)}) == 1, f"the regions of a tensor name the same axes ({self.regions})"

    @staticmethod
    def whole(mesh: Sequence[int]) -> Sharding:
        """Every device holds everything."""
        return Sharding(tuple(mesh), (Region(),) * len(mesh))

    @staticmethod
    def along(mesh: Sequence[int], axis: str, sizes: Sequence[int]) -> Sharding:
        """An axis divided into consecutive shards."""
        return Sharding(tuple(mesh), tuple(Region(((axis, *interval),)) for interval in intervals(sizes)))

    @property
    def is_final(self) -> bool:
        return len(set(self.terms)) < 2

    @cached_property
    def final(self) -> Sharding:
        """The same regions, with the terms added."""
        return Sharding(self.mesh, self.regions)

    def renumbered(self, numbers: Sequence[int]) -> Sharding:
        """The same with device n renamed to ``numbers[n]``."""
        return Sharding(tuple(numbers[device] for device in self.mesh), self.regions, tuple(numbers[term] for term in self.terms))

    @property
    def own_terms(self) -> tuple[int, ...]:
        """The term of each device; equal where values are final."""
        return self.terms or (0,) * len(self.mesh)

    @cached_property
    def held(self) -> Mapping[int, Region]:
        """By device."""
        return dict(zip(self.mesh, self.regions, strict=True))

    @cached_property
    def devices_of(self) -> Mapping[Region, tuple[int, ...]]:
        """Per region that is not empty, the devices that hold it, in order of the mesh."""
        found: dict[Region, list[int]] = {}
        for device, region in zip(self.mesh, self.regions, strict=True):
            found.setdefault(region, []).append(device)
        return {region: tuple(devices) for region, devices in found.items() if not region.is_empty}

    @cached_property
    def hull(self) -> Region:
        """The whole tensor, with the axes that the regions name."""
        ends = [[(start, stop) for _, start, stop in region.intervals] for region in self.devices_of]
        bounds = [(min(start for start, _ in own), max(stop for _, stop in own)) for own in zip(*ends, strict=True)]
        return Region.of(dict(zip(self.regions[0].axes, bounds, strict=True)))

    @cached_property
    def is_sharded(self) -> bool:
        """Whether some device holds only a part."""
        return len(set(self.regions)) > 1

    @property
    def has_copies(self) -> bool:
        """Whether two devices hold an element."""
        regions = list(self.devices_of)
        alone = all(len(devices) == 1 for devices in self.devices_of.values())
        return not alone or any(not a.intersect(b).is_empty for index, a in enumerate(regions) for b in regions[:index])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces into which the bounds of all regions divide the tensor, in order; each has one set of owners.

        devices 0 1   |--- 0 ---|-- 1 --|
        devices 2 3   |-- 2 --|--- 3 ---|
        pieces        | {0 2} |{0 3}|{1 3}|
        """
        bounds: dict[str, set[int]] = {}
        for region in self.devices_of:
            for axis, start, stop in region.intervals:
                bounds.setdefault(axis, set()).update((start, stop))
        grid = [[(axis, *ends) for ends in pairwise(sorted(bounds[axis]))] for axis in sorted(bounds)]
        return tuple(self._piece(Region(box)) for box in product(*grid))

    def _piece(self, region: Region) -> Piece:
        owners = [device for held, devices in self.devices_of.items() if held.contains(region) for device in devices]
        return Piece(region, tuple(sorted(owners)), frozenset(self._first_of_terms(owners)))

    def _first_of_terms(self, owners: Sequence[int]) -> Sequence[int]:
        """The first owner of each term, in order of the mesh."""
        return list({self._term_of[device]: device for device in sorted(owners, key=self._position.__getitem__, reverse=True)}.values())

    @cached_property
    def _term_of(self) -> Mapping[int, int]:
        return dict(zip(self.mesh, self.own_terms, strict=True))

    @cached_property
    def _position(self) -> Mapping[int, int]:
        return {device: position for position, device in enumerate(self.mesh)}

    def __str__(self) -> str:
        shown = []
        for region, devices in self.devices_of.items():
            terms = dict.fromkeys(self._term_of[device] for device in devices)
            sets = [" ".join(str(device) for device in devices if self._term_of[device] == term) for term in terms]
            shown.append(f"{region} on {{{' + '.join(sets)}}}")
        return " | ".join(shown)
