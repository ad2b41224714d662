"""Where every parameter is held, and whose gradients it sums: one sharding per parameter, from the plan and the axes alone.

Holders need not agree: one replica may shard a parameter 3:1, another 2:2, a third not at all. Devices of a split group that
hold it whole have either equal gradients, or one each from their own part of the work: then each device is a term of its own.

Stages that hold the same parameters in the same way share a pattern, and parameters with equal layouts a sharding; each is
worked out once, on demand, however many replicas and layers there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from whale.axes.labels import label
from whale.axes.values import Axes, Dimension, may_lie_in_parts
from whale.errors import PlanError
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Replica, Shard, Stage, members_of
from whale.sharding.index_sets import IndexSpace, Runs, axis_sizes, intervals
from whale.sharding.keepers import ROWS, Keeping, SharedOut, Ways, deal_by_group
from whale.sharding.sharding import Piece, Region, Sharding


@dataclass(frozen=True)
class Pattern:
    """How the devices of a stage hold parameters and buffers."""

    parameters: tuple[str, ...]
    split: int = 1  # devices of a split group
    shards: tuple[Shard, ...] = ()  # how they divide axes
    partial: frozenset[str] = frozenset()  # whole parameters whose gradients are terms of a sum over the group

    @cached_property
    def by_axis(self) -> Mapping[str, Shard]:
        return {shard.axis: shard for shard in self.shards}

    @cached_property
    def _hash(self) -> int:
        return hash((self.parameters, self.split, self.shards, self.partial))

    def __hash__(self) -> int:  # identical replicas share their patterns, which are long
        return self._hash


@dataclass(frozen=True)
class Holder:
    """A (replica, stage) place, its devices in the order of the virtual device, and the pattern of what they hold."""

    place: tuple[int, int]
    devices: tuple[int, ...]
    pattern: Pattern


@dataclass(frozen=True)
class GroupHolding:
    """How a split group holds one parameter."""

    regions: tuple[Region, ...]  # per device
    are_copies: bool  # whether all have the same complete gradient

    @cached_property
    def _hash(self) -> int:
        return hash((self.regions, self.are_copies))

    def __hash__(self) -> int:  # one form is asked about by many parameters
        return self._hash


Parts = tuple[tuple[Runs, ...], ...]
"""Per device of a split group, its positions along each dimension of a parameter."""


@dataclass(eq=False)
class Holders:
    """Collects holders; stages with identical parameters and shards share one pattern, which is slow to compare."""

    gathered: list[Holder] = field(default_factory=list)
    _patterns: dict[tuple[int, int, int, frozenset[str]], Pattern] = field(default_factory=dict)

    def add(
        self,
        place: tuple[int, int],
        devices: tuple[int, ...],
        parameters: tuple[str, ...],
        split: int,
        shards: tuple[Shard, ...],
        partial: frozenset[str] = frozenset(),
    ) -> None:
        """Adds what a stage holds; arguments as in `Holder` and `Pattern`."""
        look = id(parameters), split, id(shards), partial  # a pattern keeps both alive
        if look not in self._patterns:
            self._patterns[look] = Pattern(parameters, split, shards, partial)
        self.gathered.append(Holder(place, devices, self._patterns[look]))


Places = tuple[tuple[int, int], ...]
"""(Replica, stage) pairs."""

Forms = tuple[tuple[int, GroupHolding], ...]
"""(Number of a pattern, how it holds a parameter) for each pattern that has it."""


@dataclass(frozen=True)
class ParameterShardings:
    """Where all parameters and buffers are held."""

    holders: tuple[Holder, ...]  # who holds what
    axes: Axes | None  # of the model; None where nothing is sharded
    names: tuple[str, ...]  # of the devices, by number
    # per parameter whose state is sharded over owners, its keepers, of each group that keeps a copy, and its shape
    keeping: Mapping[str, tuple[tuple[Keeping, ...], tuple[int, ...]]] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()  # of devices that keep a copy of sharded state together; empty where all do
    sync_groups: tuple[tuple[int, ...], ...] = ()  # of devices that sum gradients in each step; empty where all do

    @cached_property
    def _by_pattern(self) -> tuple[tuple[Pattern, tuple[Holder, ...]], ...]:
        found: dict[Pattern, list[Holder]] = {}
        for holder in self.holders:
            found.setdefault(holder.pattern, []).append(holder)
        return tuple((pattern, tuple(holders)) for pattern, holders in found.items())

    @cached_property
    def _patterns_of(self) -> Mapping[str, tuple[int, ...]]:
        """Per parameter, the numbers of the patterns that have it."""
        found: dict[str, list[int]] = {}
        for number, (pattern, _) in enumerate(self._by_pattern):
            for name in dict.fromkeys(pattern.parameters):
                found.setdefault(name, []).append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self._patterns_of)

    def parts(self, pattern: Pattern, name: str) -> Parts | None:
        """The parts of a parameter that the devices of a split group hold; None where each holds all of it."""
        regions = self._form(pattern, name).regions
        return None if len(set(regions)) == 1 else tuple(map(self.space(name).positions, regions))

    @cached_property
    def pattern_at(self) -> Mapping[tuple[int, int], Pattern]:
        """By (replica, stage)."""
        return {holder.place: holder.pattern for holder in self.holders}

    def places(self, name: str) -> Places:
        """The (replica, stage) pairs that hold a parameter."""
        return self._places[self._patterns_of[name]]

    @cached_property
    def _places(self) -> Mapping[tuple[int, ...], Places]:
        sets = dict.fromkeys(self._patterns_of.values())
        return {numbers: tuple(sorted(holder.place for n in numbers for holder in self._by_pattern[n][1])) for numbers in sets}

    def gradient(self, name: str) -> Sharding:
        """The sharding of a parameter's gradient before it is summed; the parameter itself has the same regions.
        Raises PlanError if two stages of one device hold different parts.
        """
        known = self._by_name.get(name)
        if known is None:
            known = self._by_name[name] = self._known(self._forms(name), name)
        return known

    @cached_property
    def _by_name(self) -> dict[str, Sharding]:
        return {}

    def kept(self, name: str) -> Sharding:
        """The sharding of the form that the optimizer steps; devices outside its mesh have none of it."""
        if name not in self.keeping:
            return self.gradient(name).final
        copies, shape = self.keeping[name]
        devices, held = tuple(device for own in copies for device in own.devices), self.gradient(name).held
        if self.is_cut_by_keepers(name):
            parts = (Sharding.along(own.devices, ROWS, own.rows or shape[:1]) for own in copies)
            return Sharding(devices, tuple(region for own in parts for region in own.regions))
        return Sharding(devices, tuple(held[device] for device in devices))

    def is_cut_by_keepers(self, name: str) -> bool:
        """Whether several owners each keep rows of the optimizer's form."""
        return name in self.keeping and any(own.rows for own in self.keeping[name][0])

    def is_all_rows(self, name: str, region: Region) -> bool:
        """Whether the region is all of a parameter that other keepers cut."""
        return region.axes == (ROWS,) and region.volume == self.keeping[name][1][0]

    def among(self, owners: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """Owners of a parameter, by the group in which they keep a copy of its state."""
        return _among(owners, self._group_of) if self.groups else (tuple(owners),)

    def together(self, owners: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Owners of a parameter, by the group in which they sum gradients in each step; none where all do."""
        return _among(owners, self._sync_group_of) if self.sync_groups else ()

    @cached_property
    def _group_of(self) -> Mapping[int, int]:
        return _numbered(self.groups)

    @cached_property
    def _sync_group_of(self) -> Mapping[int, int]:
        return _numbered(self.sync_groups)

    def pieces_by_group(self, name: str) -> tuple[tuple[Places, tuple[Piece, ...]], ...]:
        """Of each group that keeps a copy, the places that hold the parameter on its devices, and the pieces of what these hold."""
        return self._divided(name, self._group_of)

    def summed_pieces(self, name: str) -> tuple[tuple[Places, tuple[Piece, ...]], ...]:
        """The same of each group that sums gradients in each step."""
        return self._divided(name, self._sync_group_of)

    def _divided(self, name: str, group_of: Mapping[int, int]) -> tuple[tuple[Places, tuple[Piece, ...]], ...]:
        gradient = self.gradient(name)
        key = id(gradient), self._patterns_of[name], id(group_of)
        if key not in self._by_group:
            self._by_group[key] = tuple(self._parts(gradient, self.places(name), group_of))
        return self._by_group[key]

    @cached_property
    def _by_group(self) -> dict[tuple[int, tuple[int, ...], int], tuple[tuple[Places, tuple[Piece, ...]], ...]]:
        return {}

    def _parts(self, gradient: Sharding, places: Places, group_of: Mapping[int, int]) -> Iterator[tuple[Places, tuple[Piece, ...]]]:
        if not group_of:
            yield places, gradient.pieces
            return
        for group in _among(gradient.mesh, group_of):
            own = set(group)
            held = [each for each in zip(gradient.mesh, gradient.regions, gradient.own_terms, strict=True) if each[0] in own]
            part = Sharding(*(tuple(each) for each in zip(*held, strict=True)))
            yield tuple(place for place in places if not own.isdisjoint(self._devices_at[place])), part.pieces

    @cached_property
    def _devices_at(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        return {holder.place: holder.devices for holder in self.holders}

    def ways(self, name: str) -> Iterator[tuple[int, ...]]:
        """Sets of devices that together hold a parameter once: split groups with parts of it, and single devices with all of it."""
        for number, form in self._forms(name):
            for holder in self._by_pattern[number][1]:
                split = len(form.regions) if len(set(form.regions)) > 1 else 1
                yield from (tuple(holder.devices[start : start + split]) for start in range(0, len(holder.devices), split))

    def alike(self, names: Iterable[str]) -> Iterator[tuple[Sharding, tuple[str, ...]]]:
        """The shardings of the gradients of some parameters, each once, with the parameters that have it; raises as `gradient` does."""
        found: dict[Forms, list[str]] = {}
        for name in names:
            found.setdefault(self._forms(name), []).append(name)
        for forms, own in found.items():
            yield self._known(forms, own[0]), tuple(own)

    def _forms(self, name: str) -> Forms:
        return tuple((number, self._form(self._by_pattern[number][0], name)) for number in self._patterns_of[name])

    def _known(self, forms: Forms, name: str) -> Sharding:
        known = self._worked_out.get(forms)
        if known is None:
            known = self._worked_out[forms] = self._sharding(name, forms)
        return known

    @cached_property
    def _worked_out(self) -> dict[Forms, Sharding]:
        return {}

    def is_sharded(self, name: str) -> bool:
        """Whether some device holds only a part."""
        return self.gradient(name).is_sharded

    def space(self, name: str) -> IndexSpace:
        """The index space of a parameter's regions. It has no dimensions for a parameter that no op reads, which is whole."""
        if self.is_cut_by_keepers(name):
            sizes = {ROWS if dim == 0 else f"dimension {dim}": size for dim, size in enumerate(self.keeping[name][1])}
            return IndexSpace(tuple((axis,) for axis in sizes), sizes)
        return IndexSpace(self._dimensions(name), self._sizes, frozenset() if self.axes is None else self.axes.folded)

    def num_elements(self, model: ModelGraph, name: str, region: Region) -> int:
        """Elements of a region of a parameter."""
        if region.axes == (ROWS,):
            return region.volume * prod(self.keeping[name][1][1:])
        if self.is_sharded(name):
            return self.space(name).num_elements(region)
        return model.parameter_by_name[name].spec.num_elements

    def _dimensions(self, name: str) -> tuple[Dimension, ...]:
        return () if self.axes is None else self.axes.parameters.get(name, ())

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {} if self.axes is None else axis_sizes(self.axes)

    def _form(self, pattern: Pattern, name: str) -> GroupHolding:
        dimensions = self._dimensions(name)
        met = sorted(self.axes.in_parameters.get(name, frozenset()) & pattern.by_axis.keys()) if self.axes else []
        own = [pattern.by_axis[axis] for axis in met if axis != BATCH and may_lie_in_parts(dimensions, axis)]
        own = [shard for shard in own if name not in shard.whole_parameters]
        are_copies = pattern.split > 1 and not own and name not in pattern.partial
        key = tuple((shard.axis, shard.sizes) for shard in own), pattern.split, are_copies
        if key not in self._known_forms:
            regions = tuple(Region.of(intervals(own, position)) for position in range(pattern.split))
            self._known_forms[key] = GroupHolding(regions, are_copies)
        return self._known_forms[key]

    @cached_property
    def _known_forms(self) -> dict[tuple[tuple[tuple[str, tuple[int, ...]], ...], int, bool], GroupHolding]:
        return {}

    def _sharding(self, name: str, forms: Forms) -> Sharding:
        whole = Region.of({axis: (0, self._sizes[axis]) for _, form in forms for axis in form.regions[0].axes})
        held: dict[int, Region] = {}
        terms: dict[int, int] = {}
        for number, form in forms:
            regions = tuple(region.intersect(whole) for region in form.regions)
            split = len(regions)
            for holder in self._by_pattern[number][1]:
                for index, device in enumerate(holder.devices):
                    region = regions[index % split]
                    if held.setdefault(device, region) != region:
                        shown = f"{name} on {self.names[device]}: {held[device]} and {region}"
                        raise PlanError(f"a device holds several parts of a parameter ({shown})")
                    terms[device] = holder.devices[index - index % split] if form.are_copies else device
        return Sharding(tuple(held), tuple(held.values()), tuple(terms.values()))


def _numbered(groups: Iterable[tuple[int, ...]]) -> dict[int, int]:
    """Per device, the number of its group."""
    return {device: number for number, group in enumerate(groups) for device in group}


def _among(owners: Iterable[int], group_of: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """Owners by their group."""
    found: dict[int, list[int]] = {}
    for owner in owners:
        found.setdefault(group_of[owner], []).append(owner)
    return tuple(tuple(found[number]) for number in sorted(found))


def parameter_shardings(plan: Plan, graph: ModelGraph, axes: Axes | None) -> ParameterShardings:
    """Where the parameters and buffers of a plan are held; devices are ranks of the plan. `axes` is None where no stage is sharded."""
    partial: dict[tuple[tuple[str, ...], tuple[Shard, ...]], frozenset[str]] = {}
    holders = Holders()
    for replica in plan.replicas:
        for stage in replica.stages:
            own: frozenset[str] = frozenset()
            if stage.shards:
                assert axes is not None, "what a split stage holds depends on the axes of the model"
                key = stage.ops, stage.shards
                if key not in partial:
                    partial[key] = label(graph, axes, stage.ops, stage.shards).partial_parameters
                own = partial[key] | shared_parameters(replica, stage)
                if not plan.is_alike(stage):  # copies would drift apart by rounding
                    own |= frozenset(stage.parameters)  # of these, what is whole
            devices = tuple(plan.rank_of[device] for device in stage.virtual_device.devices)
            holders.add((replica.index, stage.index), devices, stage.parameters, stage.split, stage.shards, own)
    groups, together = (tuple(map(tuple, members_of(own))) for own in (plan.keeper_groups, plan.sync_groups))
    found = ParameterShardings(tuple(holders.gathered), axes, plan.devices, groups=groups, sync_groups=together)
    shared = tuple(_shared_out(plan, graph, found))
    if not shared:
        return found
    dealt = deal_by_group(shared, plan.keeper_shares or (1,) * len(plan.devices), found.groups)
    return replace(found, keeping={name: (own, graph.parameter_by_name[name].spec.shape) for name, own in dealt.items()})


def _shared_out(plan: Plan, graph: ModelGraph, shardings: ParameterShardings) -> Iterator[SharedOut]:
    """The parameters whose optimizer form is sharded over owners."""
    known: dict[tuple[int, tuple[int, ...]], Ways] = {}  # one for equal layers: there are many, of many devices
    for state in plan.parameter_states:
        for name in state.parameters if state.kept.sharding == "owners" else ():
            spec, gradient = graph.parameter_by_name[name].spec, shardings.gradient(name)
            parts = {region: shardings.num_elements(graph, name, region) for region in gradient.devices_of}
            look = id(gradient), tuple(parts.values()) if gradient.is_sharded else ()
            if look not in known:
                sizes = {device: parts[region] for region, devices in gradient.devices_of.items() for device in devices}
                sets = dict.fromkeys(shardings.ways(name))
                known[look] = tuple({device: sizes[device] for device in way if device in sizes} for way in sets)
            num_bytes = spec.num_elements * state.element_bytes
            yield SharedOut(name, 1 if gradient.is_sharded or not spec.shape else spec.shape[0], num_bytes, known[look])


def shared_parameters(replica: Replica, stage: Stage) -> frozenset[str]:
    """Parameters of a stage that another stage on some of its devices also holds."""
    devices = set(stage.virtual_device.devices)
    others = [other for other in replica.stages if other.index != stage.index and devices & set(other.virtual_device.devices)]
    return frozenset(name for other in others for name in other.parameters) & frozenset(stage.parameters)
