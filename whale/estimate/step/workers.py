"""The devices of a plan as workers: what each does and holds by itself."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.estimate.costs.optimizer import optimizer_seconds
from whale.estimate.memory.memory import state_bytes
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.work import StageKey, Work, Works, first_alike
from whale.ir.cluster import NO_HANDLING, Handling
from whale.ir.graph import Parameter
from whale.ir.plan import ParameterState, Plan, Replica, Stage
from whale.ir.schedule import Kind, Schedule


@dataclass(frozen=True)
class Worker:
    """One device by itself: equal workers do the same if what they exchange is the same.

    Attributes:
        schedule: which of the schedules that replicas follow.
        rank: of its pipeline.
        stages: that it runs, in order.
        rows: per micro-batch, the rows that its replica takes.
        works: per stage and number of rows of a micro-batch, its work.
        held: bytes of parameters with what training keeps beside them, but for `apart`.
        apart: bytes of gradients that are in no bucket: they are there from the first backward passes on.
        stage_bytes: the same, for each of its stages by itself.
        optimizer: seconds of the optimizer's step.
        capacity: bytes that a plan may use.
        handling: what messages take of it.
    """

    schedule: int
    rank: int
    stages: tuple[int, ...]
    rows: tuple[int, ...]
    works: tuple[tuple[tuple[int, int], Work], ...]
    held: MemoryUse
    apart: float
    stage_bytes: tuple[float, ...]
    optimizer: float
    capacity: int
    handling: Handling = NO_HANDLING

    @cached_property
    def _hash(self) -> int:
        return hash((self.schedule, self.rank, self.rows, self.works, self.held))

    def __hash__(self) -> int:  # equal replicas share their workers, which are long
        return self._hash

    @cached_property
    def work(self) -> Mapping[tuple[int, int], Work]:
        """`works` to look up."""
        return dict(self.works)


@dataclass(frozen=True, slots=True)
class _Place:
    """A stage of a replica, with what all its devices ask for.

    Attributes:
        groups: its split groups.
        rows: per number of rows of a micro-batch, those of each device.
    """

    stage: Stage
    key: StageKey
    groups: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[int, tuple[int, ...]], ...]


class Workers:
    """Makes workers of the devices of replicas; equal questions are answered once.

    Args:
        plan: the plan.
        prices: of its graph on its cluster.
        bucketed: parameters whose gradients lie in buckets.
    """

    def __init__(self, plan: Plan, prices: Prices, bucketed: frozenset[str]) -> None:
        self._plan, self._prices = plan, prices
        self._works = Works(prices, plan.parameter_states, bucketed)
        self._held = _Held(prices, plan.parameter_states, bucketed)
        self._rows = plan.all_micro_batch_rows(plan.planned_rows)
        self._of_kind: dict[int, set[tuple[int | None, Kind]]] = {}
        self._keys: dict[StageKey, StageKey] = {}
        self._known: dict[Hashable, tuple[Worker, ...]] = {}
        self._same: dict[Hashable, tuple[Worker, ...]] = {}

    def of(self, replica: Replica, schedule: Schedule, number: int) -> Iterator[tuple[str, Worker]]:
        """The devices of a replica, each with what it does: that of equal replicas on equal devices is found once.

        Args:
            schedule: of the replica.
            number: of that schedule among all.
        """
        groups = tuple(self._works.likeness(group) for stage in replica.stages for group in stage.groups)
        stages = [(own.ops, own.parameters, own.program, own.shards, own.shares, own.split) for own in replica.stages]
        same = number, groups, self._sizes(replica), id(replica.edges), tuple(id(part) for own in stages for part in own)
        if same not in self._same:  # else what they are made of, which is long, is one for both
            look = number, groups, self._sizes(replica), replica.edges, tuple(stages)
            if look not in self._known:
                self._known[look] = tuple(self._found(replica, schedule, number))
            self._same[same] = self._known[look]
        firsts = (replica.stages[schedule.stages_of(rank)[0]] for rank in range(schedule.num_ranks))
        return zip((device for stage in firsts for device in stage.virtual_device.devices), self._same[same], strict=True)

    def _sizes(self, replica: Replica) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self._rows[replica.index])

    def _found(self, replica: Replica, schedule: Schedule, number: int) -> Iterator[Worker]:
        """The workers of a replica, rank by rank."""
        if number not in self._of_kind:
            kinds = (Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT)
            self._of_kind[number] = {(a.stage, a.kind) for actions in schedule.ranks for a in actions if a.kind in kinds}
        rows = self._sizes(replica)
        places = [self._place(stage, stage_key(replica, stage, self._of_kind[number]), sorted(set(rows))) for stage in replica.stages]
        for rank in range(schedule.num_ranks):
            own = [places[stage] for stage in schedule.stages_of(rank)]
            for index, device in enumerate(own[0].stage.virtual_device.devices):
                yield self._worker(number, rank, own, index, device, rows)

    def _place(self, stage: Stage, key: StageKey, sizes: Sequence[int]) -> _Place:
        known = self._keys.setdefault(key, key)  # one object for equal keys, which are long
        return _Place(stage, known, stage.groups, tuple((size, stage.rows(size)) for size in sizes))

    def _worker(self, number: int, rank: int, own: Sequence[_Place], index: int, device: str, rows: tuple[int, ...]) -> Worker:
        positions = [index % place.stage.split for place in own]
        held, trained, apart = self._held.of([place.key for place in own], positions)
        known, costs = self._prices.cluster.by_name[device], self._prices.costs
        return Worker(
            number,
            rank,
            tuple(place.stage.index for place in own),
            rows,
            tuple(self._work(own, index)),
            replace(held, gradients=held.gradients - apart),
            apart,
            tuple(self._held.of([place.key], [position])[0].total for place, position in zip(own, positions, strict=True)),
            optimizer_seconds(known, trained, held.gradients, held.optimizer),
            costs.capacity(known),
            known.handling,
        )

    def _work(self, own: Sequence[_Place], index: int) -> Iterator[tuple[tuple[int, int], Work]]:
        for place in own:
            group, position = divmod(index, place.stage.split)
            for size, rows in place.rows:
                yield (place.stage.index, size), self._works.of(place.key, place.groups[group], position, rows[index])


def stage_key(replica: Replica, stage: Stage, kinds: Collection[tuple[int | None, Kind]] = ()) -> StageKey:
    """A stage of a plan as its price sees it.

    Args:
        kinds: which stages of the schedule have R or W actions.
    """
    received = tuple((edge.source, edge.tensors) for edge in replica.edges if edge.target == stage.index)
    handed_on = dict.fromkeys(name for edge in replica.edges if edge.source == stage.index for name in edge.tensors)
    part = Part(stage.ops, stage.parameters, received, tuple(handed_on))
    recomputes, defers = ((stage.index, kind) in kinds for kind in (Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT))
    return StageKey(part, stage.recomputed, stage.shards, stage.overlap, recomputes, defers)


class _Held:
    """Bytes of parameters on a device, with what training keeps beside them."""

    def __init__(self, prices: Prices, states: tuple[ParameterState, ...], bucketed: frozenset[str]) -> None:
        self._prices, self._states, self._bucketed = prices, states, bucketed
        self._known: dict[tuple[tuple[StageKey, ...], tuple[int, ...]], tuple[MemoryUse, float, float]] = {}

    def of(self, keys: Sequence[StageKey], positions: Sequence[int]) -> tuple[MemoryUse, float, float]:
        """The bytes, those of the weights that train, and of the gradients those that are in no bucket.

        What several stages of a device hold counts once.
        """
        positions = [first_alike(key.shards, position) for key, position in zip(keys, positions, strict=True)]
        question = tuple(keys), tuple(positions)
        if question not in self._known:
            found: dict[str, Parameter] = {}
            for key, position in zip(keys, positions, strict=True):
                own = self._prices.local(key.part.ops, key.shards, position) if key.shards else self._prices
                found |= {name: own.graph.parameter_by_name[name] for name in key.part.parameters}
            self._known[question] = self._add(found)
        return self._known[question]

    def _add(self, parameters: Mapping[str, Parameter]) -> tuple[MemoryUse, float, float]:
        by_name = {name: state_bytes(known, self._states, training=self._prices.training) for name, known in parameters.items()}
        held = list(by_name.values())
        use = MemoryUse(
            float(sum(each.compute for each in held)),
            float(sum(each.gradient for each in held)),
            float(sum(each.optimizer for each in held)),
        )
        apart = sum(each.gradient for name, each in by_name.items() if name not in self._bucketed)
        return use, float(sum(each.compute for each in held if each.gradient)), float(apart)
