"""Where every parameter is held, and whose gradients it sums: one sharding per parameter, from the plan and the axes alone.

Holders need not agree: one replica may shard a parameter 3:1, another 2:2, a third not at all. Devices of a split group that
hold it whole have either equal gradients, or one each from their own part of the work: then each device is a term of its own.

Stages that hold the same parameters in the same way share a pattern, and parameters with equal layouts a sharding; each is
worked out once, on demand, however many replicas and layers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from whale.axes.labels import label
from whale.axes.values import Axes, Dimension, may_lie_in_parts
from whale.errors import PlanError
from whale.ir.graph import DTYPE_BYTES, ModelGraph
from whale.ir.plan import BATCH, Plan, Replica, Shard, Stage
from whale.sharding.index_sets import IndexSpace, Runs, axis_sizes, intervals
from whale.sharding.keepers import ROWS, Keeping, SharedOut, Ways, deal
from whale.sharding.sharding import Region, Sharding


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


Forms = tuple[tuple[int, GroupHolding], ...]
"""(Number of a pattern, how it holds a parameter) for each pattern that has it."""


@dataclass(frozen=True)
class ParameterShardings:
    """Where all parameters and buffers are held."""

    holders: tuple[Holder, ...]  # who holds what
    axes: Axes | None  # of the model; None where nothing is sharded
    names: tuple[str, ...]  # of the devices, by number
    # per parameter whose state is sharded over owners, its keepers and its shape
    keeping: Mapping[str, tuple[Keeping, tuple[int, ...]]] = field(default_factory=dict)

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

    def places(self, name: str) -> tuple[tuple[int, int], ...]:
        """The (replica, stage) pairs that hold a parameter."""
        return self._places[self._patterns_of[name]]

    @cached_property
    def _places(self) -> Mapping[tuple[int, ...], tuple[tuple[int, int], ...]]:
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
        keeping, _ = self.keeping[name]
        if keeping.rows:
            return Sharding.along(keeping.devices, ROWS, keeping.rows)
        return Sharding(keeping.devices, tuple(self.gradient(name).held[device] for device in keeping.devices))

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
        if name in self.keeping and self.keeping[name][0].rows:
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
    found = ParameterShardings(tuple(holders.gathered), axes, plan.devices)
    shared = tuple(_shared_out(plan, graph, found))
    if not shared:
        return found
    dealt = deal(shared, plan.keeper_shares or (1,) * len(plan.devices))
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
            num_bytes = spec.num_elements * DTYPE_BYTES[state.kept.dtype] * (1 + state.num_optimizer_tensors)
            yield SharedOut(name, 1 if gradient.is_sharded or not spec.shape else spec.shape[0], num_bytes, known[look])


def shared_parameters(replica: Replica, stage: Stage) -> frozenset[str]:
    """Parameters of a stage that another stage on some of its devices also holds."""
    devices = set(stage.virtual_device.devices)
    others = [other for other in replica.stages if other.index != stage.index and devices & set(other.virtual_device.devices)]
    return frozenset(name for other in others for name in other.parameters) & frozenset(stage.parameters)
