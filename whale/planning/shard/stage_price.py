"""Prices a stage on each of its devices; for a split stage: its part of the ops and of memory, and the group's exchanges."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale.axes.values import may_lie_in_parts
from whale.estimate import Line, edge_line
from whale.estimate.costs.line import Started
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.collective_costs import CollectiveCosts, StagePlace
from whale.estimate.prices.part import Part, Recompute
from whale.estimate.prices.prices import PartCost, Prices
from whale.estimate.prices.repeated import RepeatedBridges
from whale.ir.cluster import Device
from whale.ir.plan import BATCH, Shard
from whale.planning.pipeline.placement import Likeness, likeness_of
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.pricing import DeviceCost, cost_alone, received_line
from whale.planning.shard.memory import MemoryBudget, capacity_of, repeated_of
from whale.planning.shard.overlapping import Overlapper, Overlapping
from whale.planning.shard.sharding import Sharder, StageSharding
from whale.planning.shard.space import Scene
from whale.planning.strategy import Placed
from whale.planning.structure.stages import Assignment


@dataclass(frozen=True)
class PricedStage:
    """A stage on its devices."""

    costs: tuple[DeviceCost, ...]  # per device
    sharding: StageSharding | None = None  # what is cut and why; None for an unsplit stage
    overlapping: Overlapping | None = None  # whether it computes in two halves, and why; None for an unsplit stage

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.sharding.shards if self.sharding else ()


@dataclass(frozen=True)
class StagePricing:
    """Prices stages within a budget, after the passes inside split stages have decided."""

    prices: Prices
    sharder: Sharder  # decides what is cut
    overlapper: Overlapper  # decides whether rows are computed in halves
    budget: Budget = ALL
    _known: dict[Hashable, tuple[Mapping[tuple[int, Device], DeviceCost], Overlapping]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @staticmethod
    def of(prices: Prices, overlap: bool | None = None) -> StagePricing:
        """With new passes; `overlap`: whether split stages compute in halves, None where that pays."""
        return StagePricing(prices, Sharder(prices), Overlapper(prices, overlap))

    def reserving(self, lacking: Mapping[Device, int]) -> StagePricing:
        """The same with more bytes left free on each device type."""
        return replace(self, budget=self.budget.reserving(lacking))

    def kept_by(self, pipelines: Sequence[PipelineShape], count: int = 1) -> StagePricing:
        """The same where there are `count` replicas of each of these, which may shard the state of each parameter."""
        if not self.prices.costs.zero:
            is_alone = count == len(pipelines) == 1 and all(pipelines[0].num_groups(stage) == 1 for stage in range(pipelines[0].num_stages))
            return self.alone if is_alone else self
        num_keepers = count * sum(pipeline.num_keepers for pipeline in pipelines)
        sums_at_once = all(pipeline.num_micro_batch == 1 for pipeline in pipelines)
        return replace(self, budget=replace(self.budget, num_keepers=num_keepers, sums_at_once=sums_at_once))

    @property
    def alone(self) -> StagePricing:
        """The same where one replica holds each parameter once."""
        return self if self.prices.costs.zero else replace(self, budget=replace(self.budget, is_alone=True))

    def capacity(self, device: str) -> int:
        """Bytes that a plan may fill."""
        return self.prices.capacity(device, self.budget)

    @property
    def rooms(self) -> dict[Device, int]:
        """The same per device type."""
        return {device.kind: self.capacity(device.name) for device in self.prices.cluster.devices}

    def price(
        self,
        pipeline: PipelineShape,
        assignment: Assignment,
        stage: int,
        placed: Placed,
        num_rows: float,
        recomputes: Sequence[Recompute],
        cut_for: Sequence[Recompute] | None = None,
    ) -> PricedStage:
        """Prices a stage about `num_rows` of a micro-batch; a split stage is cut first, to fit with `cut_for` or `recomputes`."""
        recompute = recomputes[stage]
        devices = [placed[rank] for rank in pipeline.stage_rank]
        groups = groups_of(devices[stage], pipeline.width(stage))
        rows = max(1.0, num_rows / len(groups))
        if pipeline.width(stage) == 1:
            waits = pipeline.waiting[stage] > 0
            alone = (
                cost_alone(self.prices, assignment.parts[stage], name, rows, recompute, self.budget, waits=waits) for name in devices[stage]
            )
            costs = (replace(own, receive=received_line(self.prices, own.part, devices, stage, index)) for index, own in enumerate(alone))
            return PricedStage(tuple(costs))
        scene = make_scene(self.prices, assignment, stage, pipeline)
        site = StagePlace(unlike_groups(groups, self.prices), rows, pipeline.in_flight[stage], pipeline.num_micro_batch)
        budget = self._budget(pipeline, assignment, stage, num_rows, cut_for or recomputes, site)
        sharding = self.sharder.choose(scene, site, budget, pipeline.splits[stage])
        known, overlapping = self._parts(assignment.parts[stage], scene, site, sharding, recompute, waits=pipeline.waiting[stage] > 0)
        together = []
        for index, name in enumerate(devices[stage]):
            own = known[index % site.width, self.prices.cluster.by_name[name].kind]
            receive = received_line(self.prices, own.part, devices, stage, index)
            receive = receive + _from_own_devices(self.prices, pipeline, assignment, stage, devices, index, scene.rows_arriving)
            together.append(replace(own, receive=receive, capacity=self.capacity(name)))
        return PricedStage(tuple(together), sharding, overlapping)

    def parts(
        self,
        pipeline: PipelineShape,
        assignment: Assignment,
        stage: int,
        placed: Placed,
        num_rows: float,
        recomputes: Sequence[Recompute],
        cut_for: Sequence[Recompute],
    ) -> tuple[PartCost, ...]:
        """What each device of a stage needs; arguments as of `price`."""
        return tuple(cost.part for cost in self.price(pipeline, assignment, stage, placed, num_rows, recomputes, cut_for).costs)

    def _budget(
        self,
        pipeline: PipelineShape,
        assignment: Assignment,
        stage: int,
        num_rows: float,
        recomputes: Sequence[Recompute],
        site: StagePlace,
    ) -> MemoryBudget:
        """What a device of a split stage holds; split stages of one device share its memory by what they hold uncut."""
        kept, working, taken, waiting = dict[int, float](), 0.0, 0.0, False
        for own in pipeline.stages_of(pipeline.stage_rank[stage]):
            rows = max(1.0, num_rows / pipeline.num_groups(own))
            part = self.prices.part(assignment.parts[own], rows, recomputes[own], self.budget, waits=pipeline.waiting[own] > 0)
            held, waits = part.held(pipeline.alive(own)).at(rows), part.waits.at(rows) * (pipeline.waiting[own] > 0)
            waiting |= own == stage and part.waits.per_row > 0
            if pipeline.width(own) == 1:
                taken += held
            else:
                kept[own], working = held + waits, max(working, part.beside.at(rows) - waits)  # what an op needs is cut with it
        total = sum(kept.values())
        share = kept[stage] / total if total else 1 / len(kept)  # nothing is held of frozen weights that are kept on hosts
        repeated = repeated_of(assignment.parts[stage].ops, recomputes[stage], pipeline.waiting[stage] if waiting else 0)
        capacity = capacity_of(site, self.prices, self.budget)
        return MemoryBudget(kept[stage] + working * share, pipeline.in_flight[stage], capacity, taken, share, repeated, self.budget)

    def _parts(
        self, part: Part, scene: Scene, site: StagePlace, sharding: StageSharding, recompute: Recompute, *, waits: bool
    ) -> tuple[Mapping[tuple[int, Device], DeviceCost], Overlapping]:
        """Cost of a split stage by position in the group and device type, and whether rows are in halves."""
        key = part, scene, sharding.shards, recompute, sharding.cut.costs, self.budget.keeping, waits
        if key not in self._known:
            self._known[key] = self._price_parts(part, scene, site, sharding.shards, recompute, waits=waits)
        return self._known[key]

    def _price_parts(
        self, part: Part, scene: Scene, site: StagePlace, shards: tuple[Shard, ...], recompute: Recompute, *, waits: bool
    ) -> tuple[Mapping[tuple[int, Device], DeviceCost], Overlapping]:
        prices = self.prices
        parts = [prices.local(scene.ops, shards, position) for position in range(site.width)]
        names = {(place, prices.cluster.by_name[name].kind): name for group in site.groups for place, name in enumerate(group)}
        labels = prices.labels(scene.ops, shards)
        bridges = prices.bridges(scene.ops, shards, scene.returned)
        repeating = RepeatedBridges(prices, labels, bridges, recompute.segments, part.crossing)
        forms = [repeating.forms(position) for position in range(site.width)]
        alone = {
            (place, kind): cost_alone(parts[place], part, name, site.num_rows, recompute, self.budget, waits=waits, forms=forms[place])
            for (place, kind), name in names.items()
        }
        collective_costs = CollectiveCosts(prices, site)
        sums = Line.sum(collective_costs.synchronized(prices.graph.by_name[name]) for name in labels.synchronized if prices.training)
        repeated = tuple(bridges if recompute.num_alive else repeating.exchanged())
        copies = [repeating.copies(position) for position in range(site.width)]
        whole = []
        for (_, kind), own in alone.items():
            (forward, backward), (repeated_seconds, _) = collective_costs.started(bridges, kind), collective_costs.started(repeated, kind)
            whole.append((own.forward + forward, own.backward + backward + repeated_seconds + Started(sums)))
        overlapping, seconds = self.overlapper.choose(collective_costs, scene, shards, bridges, tuple(whole), recompute)
        costs = {
            key: replace(own, forward=there, backward=back, part=own.part.with_copies(copies[key[0]], recompute))
            for (key, own), (there, back) in zip(alone.items(), seconds, strict=True)
        }
        return costs, overlapping


def unlike_groups(groups: Iterable[tuple[str, ...]], prices: Prices) -> tuple[tuple[str, ...], ...]:
    """The first of each distinct kind of group."""
    found: dict[Likeness, tuple[str, ...]] = {}
    for group in groups:
        found.setdefault(likeness_of((group,), prices.cluster), group)
    return tuple(found.values())


def groups_of(devices: Sequence[str], width: int) -> tuple[tuple[str, ...], ...]:
    """The split groups of a virtual device: consecutive devices."""
    return tuple(tuple(devices[start : start + width]) for start in range(0, len(devices), width))


def make_scene(prices: Prices, assignment: Assignment, stage: int, pipeline: PipelineShape) -> Scene:
    stage_rank = pipeline.stage_rank
    part = assignment.parts[stage]
    neighbours = [index for index, rank in enumerate(stage_rank) if rank == stage_rank[stage] and index != stage]
    arriving, leaving = _rows_apart(prices, assignment, stage, pipeline)
    return Scene(
        prices.graph,
        prices.axes,
        part.ops,
        received=frozenset(part.arriving),
        handed_on=frozenset(name for other in assignment.parts for name in other.received_from(stage)),
        shared=frozenset(part.parameters).intersection(name for index in neighbours for name in assignment.parts[index].parameters),
        rows_arriving=arriving,
        rows_leaving=leaving,
    )


def _rows_apart(prices: Prices, assignment: Assignment, stage: int, pipeline: PipelineShape) -> tuple[frozenset[str], frozenset[str]]:
    """Values from stages on the same devices which divide the rows, and values that only such stages read."""
    rank, width = pipeline.stage_rank, pipeline.width
    narrower = {other for other in range(len(rank)) if rank[other] == rank[stage] and width(other) < width(stage)}
    if not narrower or BATCH not in prices.axes.by_name:
        return frozenset(), frozenset()
    arriving = {name for source, names in assignment.parts[stage].received if source in narrower for name in names}
    readers: dict[str, set[int]] = {}
    for target, part in enumerate(assignment.parts):
        for name in part.received_from(stage):
            readers.setdefault(name, set()).add(target)
    leaving = {name for name, targets in readers.items() if targets <= narrower}
    leaving -= {*prices.graph.outputs, *(name for term in prices.graph.loss for name in (term.sum, term.weight) if name)}
    return _with_batch(prices, arriving), _with_batch(prices, leaving)


def _with_batch(prices: Prices, names: Iterable[str]) -> frozenset[str]:
    """Those that can lie in parts of the rows."""
    return frozenset(name for name in names if may_lie_in_parts(prices.axes.ops[name].outputs[0], BATCH))


def _from_own_devices(
    prices: Prices,
    pipeline: PipelineShape,
    assignment: Assignment,
    stage: int,
    devices: Sequence[Sequence[str]],
    index: int,
    in_parts: Collection[str],
) -> Line:
    """Waiting for rows of an earlier stage's values from other devices of the same virtual device."""
    own, found, width = devices[stage], Line(), pipeline.width(stage)
    neighbour = own[index - index % width + (index + 1) % width]
    for source, received in assignment.parts[stage].received:
        tensors = tuple(name for name in received if name not in in_parts)
        narrower = width // pipeline.width(source)
        if pipeline.stage_rank[source] != pipeline.stage_rank[stage] or narrower < 2:
            continue
        forward, backward = prices.payload(tensors)
        num_messages = (narrower - 1) * (len(tensors) + prices.num_gradients(tensors))
        found = found + edge_line(prices.link(own[index], neighbour), (forward + backward) * (1 - 1 / narrower), num_messages)
    return found
