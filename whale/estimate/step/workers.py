"""The devices of a plan as workers: what each does and holds by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.estimate.costs.optimizer import optimizer_seconds
from whale.estimate.memory.memory import state_bytes
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.work import StageKey, Work, Works
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
        held: bytes of parameters with what training keeps beside them.
        stage_bytes: the same, for each of its stages by itself.
        optimizer: seconds of the optimizer's step.
        capacity: bytes that a plan may use.
    """

    schedule: int
    rank: int
    stages: tuple[int, ...]
    rows: tuple[int, ...]
    works: tuple[tuple[tuple[int, int], Work], ...]
    held: MemoryUse
    stage_bytes: tuple[float, ...]
    optimizer: float
    capacity: int

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
    """

    def __init__(self, plan: Plan, prices: Prices) -> None:
        self._plan, self._prices = plan, prices
        self._works, self._held = Works(prices), _Held(prices, plan.parameter_states)
        self._rows = plan.all_micro_batch_rows(plan.planned_rows)
        self._recomputed: dict[int, set[int | None]] = {}
        self._keys: dict[StageKey, StageKey] = {}

    def of(self, replica: Replica, schedule: Schedule, number: int) -> Iterator[tuple[str, Worker]]:
        """The devices of a replica, each with what it does.

        Args:
            schedule: of the replica.
            number: of that schedule among all.
        """
        if number not in self._recomputed:
            self._recomputed[number] = {a.stage for actions in schedule.ranks for a in actions if a.kind is Kind.RECOMPUTE}
        rows = tuple(stop - start for start, stop in self._rows[replica.index])
        places = [
            self._place(stage, stage_key(replica, stage, recomputes=stage.index in self._recomputed[number]), sorted(set(rows)))
            for stage in replica.stages
        ]
        for rank in range(schedule.num_ranks):
            own = [places[stage] for stage in schedule.stages_of(rank)]
            for index, device in enumerate(own[0].stage.virtual_device.devices):
                yield device, self._worker(number, rank, own, index, device, rows)

    def _place(self, stage: Stage, key: StageKey, sizes: Sequence[int]) -> _Place:
        known = self._keys.setdefault(key, key)  # one object for equal keys, which are long
        return _Place(stage, known, stage.groups, tuple((size, stage.rows(size)) for size in sizes))

    def _worker(self, number: int, rank: int, own: Sequence[_Place], index: int, device: str, rows: tuple[int, ...]) -> Worker:
        positions = [index % place.stage.split for place in own]
        held, trained = self._held.of([place.key for place in own], positions)
        known, costs = self._prices.cluster.by_name[device], self._prices.costs
        return Worker(
            number,
            rank,
            tuple(place.stage.index for place in own),
            rows,
            tuple(self._work(own, index)),
            held,
            tuple(self._held.of([place.key], [position])[0].total for place, position in zip(own, positions, strict=True)),
            optimizer_seconds(known, trained, held.gradients, held.optimizer),
            costs.capacity(known),
        )

    def _work(self, own: Sequence[_Place], index: int) -> Iterator[tuple[tuple[int, int], Work]]:
        for place in own:
            group, position = divmod(index, place.stage.split)
            for size, rows in place.rows:
                yield (place.stage.index, size), self._works.of(place.key, place.groups[group], position, rows[index])


def stage_key(replica: Replica, stage: Stage, *, recomputes: bool = False) -> StageKey:
    """A stage of a plan as its price sees it."""
    received = tuple((edge.source, edge.tensors) for edge in replica.edges if edge.target == stage.index)
    handed_on = dict.fromkeys(name for edge in replica.edges if edge.source == stage.index for name in edge.tensors)
    part = Part(stage.ops, stage.parameters, received, tuple(handed_on))
    return StageKey(part, stage.recomputed, stage.shards, stage.overlap, recomputes)


class _Held:
    """Bytes of parameters on a device, with what training keeps beside them."""

    def __init__(self, prices: Prices, states: tuple[ParameterState, ...]) -> None:
        self._prices, self._states = prices, states
        self._known: dict[tuple[tuple[StageKey, ...], tuple[int, ...]], tuple[MemoryUse, float]] = {}

    def of(self, keys: Sequence[StageKey], positions: Sequence[int]) -> tuple[MemoryUse, float]:
        """The bytes, and those of the weights that train; what several stages of a device hold counts once."""
        question = tuple(keys), tuple(positions)
        if question not in self._known:
            found: dict[str, Parameter] = {}
            for key, position in zip(keys, positions, strict=True):
                own = self._prices.local(key.part.ops, key.shards, position) if key.shards else self._prices
                found |= {name: own.graph.parameter_by_name[name] for name in key.part.parameters}
            self._known[question] = self._add(list(found.values()))
        return self._known[question]

    def _add(self, parameters: Sequence[Parameter]) -> tuple[MemoryUse, float]:
        prices = self._prices
        held = [state_bytes(parameter, self._states, training=prices.training) for parameter in parameters]
        use = MemoryUse(
            float(sum(each.compute for each in held)),
            float(sum(each.gradient for each in held)),
            float(sum(each.optimizer for each in held)),
        )
        return use, float(sum(each.compute for each in held if each.gradient))
