"""The devices of a plan as workers: what each does and holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from whale.estimate.costs.compute import host_step_seconds, optimizer_seconds
from whale.estimate.memory.memory import StateBytes, state_bytes
from whale.estimate.memory.passes import SummedGradients
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.sync import (
    Brought,
    Gathering,
    SummedBuckets,
    SummedHere,
    deferred,
    giving_seconds,
    most_at_once,
    sizes_of_pieces,
    summed_by_rank,
)
from whale.estimate.step.work import StageKey, Work, Works, first_alike
from whale.ir.cluster import NO_HANDLING, Device, Handling
from whale.ir.graph import DTYPE_BYTES, Parameter
from whale.ir.plan import ParameterState, Plan, Replica, Stage
from whale.ir.schedule import Kind, Schedule
from whale.schedules import count_in_flight
from whale.sharding.buckets import Buckets, filled_up

_NOTHING: Mapping[str, int] = {}

_Sums = tuple[int, ...]
"""The numbers of `_State`, added over parameters."""

_NO_SUMS: _Sums = (0,) * 12


@dataclass(frozen=True)
class SimulatedWorker:
    """One device: equal workers do the same if what they exchange is the same."""

    schedule: int  # index among the distinct schedules
    rank: int  # of its pipeline
    stages: tuple[int, ...]  # that it runs, in order
    rows: tuple[int, ...]  # per micro-batch, the rows that its replica takes
    works: tuple[tuple[tuple[int, int], Work], ...]  # per stage and number of rows of a micro-batch
    held: MemoryUse  # bytes of parameters with gradients and optimizer state, without `unbucketed`
    unbucketed: float  # bytes of gradients in no bucket, alive from the first backward passes on
    casts: float  # bytes of gradients in the optimizer's dtype, where that differs
    stage_bytes: tuple[float, ...]  # `held` and `unbucketed` of each of its stages alone
    optimizer: float  # seconds of the optimizer's step, of casts before it, and until ops can read the result
    capacity: int  # bytes that a plan may use
    handling: Handling = NO_HANDLING  # of messages
    on_host: float = 0.0  # bytes in the memory of its host; of activations the most
    sent: float = 0.0  # bytes of buckets in flight, from the first last backward pass to the optimizer's step, but those that passes count
    sent_late: float = 0.0  # bytes of those that start when all backward passes are done
    # bytes of gradients that fall into pieces, beside their buckets: from the first backward pass to the optimizer's step, and to its end
    apart: tuple[float, float] = (0.0, 0.0)
    throughout: float = 0.0  # bytes of weights gathered before the first pass, and freed before the optimizer's step
    freed: tuple[float, ...] = ()  # per stage, bytes of gradients of other keepers freed by the end of its last backward pass
    freed_last: float = 0.0  # the rest of these, by the optimizer's step
    published: float = 0.0  # peak bytes of buckets in flight after the optimizer's step, without those in which ops read
    num_given: int = 0  # buckets of weights sent before the step ends

    @cached_property
    def _hash(self) -> int:
        return hash((self.schedule, self.rank, self.rows, self.works, self.held))

    def __hash__(self) -> int:  # equal replicas share their workers, which are long
        return self._hash

    @cached_property
    def work(self) -> Mapping[tuple[int, int], Work]:
        return dict(self.works)


@dataclass(frozen=True, slots=True)
class _Place:
    """A stage of a replica, with what all its devices share."""

    stage: Stage
    key: StageKey
    groups: tuple[tuple[str, ...], ...]  # its split groups
    rows: tuple[tuple[int, tuple[int, ...]], ...]  # per number of rows of a micro-batch, those of each device


@dataclass(frozen=True, eq=False)
class _Team:
    """What equal replicas on equal devices share."""

    number: int  # of their schedule
    rows: tuple[int, ...]  # per micro-batch
    ranks: tuple[tuple[_Place, ...], ...]  # per rank, its stages
    workers: dict[Hashable, SimulatedWorker] = field(default_factory=dict)  # by rank, index of the device there, and what is its own


class _Own(NamedTuple):
    """What a device has that those of equal replicas may not have: it keeps other parameters, on a host with other devices."""

    kept: tuple[_Sums, ...] = ()  # of what it keeps: of all its stages, and of each of them
    sums: tuple[tuple[SummedGradients, ...], ...] = ()  # per stage, as in `SummedHere`
    freed: tuple[float, ...] = ()  # per stage
    freed_last: float = 0.0  # the rest, by the optimizer's step
    lost: tuple[int, ...] = ()  # of all its stages, and of each of them
    casting: float = 0.0  # seconds
    sent: float = 0.0
    sent_late: float = 0.0
    brought: tuple[Brought, ...] = ()  # per stage
    throughout: float = 0.0  # bytes of gathered weights
    given: float = 0.0  # seconds in which it sends and receives weights outside of passes
    num_given: int = 0  # buckets
    in_buckets: int = 0  # bytes that buckets of weights add to those of weights
    padding: int = 0  # the same of gradients
    apart: tuple[float, float] = (0.0, 0.0)  # as in `SimulatedWorker`
    published: float = 0.0
    num_on_host: int = 1  # devices of its host, where state lives there


class Workers:
    """Makes workers of the devices of replicas; equal devices share theirs."""

    def __init__(self, plan: Plan, prices: Prices, buckets: Buckets, schedules: Sequence[Schedule]) -> None:
        self._plan, self._prices, self._kept = plan, prices, buckets.kept
        bucketed = frozenset(name for bucket in buckets.summed if bucket.form.sharding == "stage" for name in bucket.names)
        self._uses_hosts = any(state.kept.home == "host" for state in plan.parameter_states)
        self._gathers = any(state.is_shared_out for state in plan.parameter_states)  # then sums start when all passes are done
        self._num_on_host = Counter(prices.cluster.by_name[device].host for device in plan.devices)
        self._gathering = Gathering(plan, prices, buckets.gathered, schedules)
        self._publishing: dict[str, float] = {}
        self._num_given = Counter[str]()
        later = set(map(id, deferred(buckets.published, prices)))
        for bucket in buckets.published:
            for device, seconds in giving_seconds(plan, prices, bucket).items() if id(bucket) not in later else ():
                self._publishing[device] = self._publishing.get(device, 0.0) + seconds
                self._num_given[device] += 1
        self._padding, self._apart = Counter[int](), dict[int, tuple[float, float]]()
        for (rank, name), own in sizes_of_pieces(each for each in buckets.summed if each.form.sharding == "stage").items():
            self._padding[rank] += sum(map(filled_up, own)) - filled_up(sum(own))
            passed, stepped = self._apart.get(rank, (0.0, 0.0))
            stays = sum(own) * (plan.state_of(name).kept.sharding == "stage")
            self._apart[rank] = passed + sum(own) - stays, stepped + stays
        self._summed = dict(summed_by_rank(plan, prices.graph, buckets.summed))
        self._nothing_summed = SummedHere(0, SummedBuckets(plan, (), {}))
        self._published: dict[int, list[int]] = {}
        self._filling: dict[int, int] = {}  # of buckets in which ops read weights
        for bucket in buckets.published:
            for owner in bucket.owners:
                if bucket.is_read_in_place:
                    self._filling[owner] = self._filling.get(owner, 0) + bucket.padding_bytes
                else:
                    self._published.setdefault(owner, []).append(bucket.num_bytes)
        let_go = frozenset(name for bucket in buckets.summed if bucket.form.sharding == "owners" for name in bucket.names)
        self._works = Works(prices, plan.state_of, bucketed)
        unlike = frozenset(name for bucket in buckets.gathered if bucket.is_unlike for name in bucket.names)
        self._held = _ParameterMemory(prices, plan, bucketed, let_go, unlike, are_shared=bool(self._kept))
        self._rows = plan.all_micro_batch_rows(plan.planned_rows)
        self._of_kind: dict[int, set[tuple[int | None, Kind]]] = {}
        self._in_flight: dict[int, tuple[int, ...]] = {}
        self._keys: dict[StageKey, StageKey] = {}
        self._teams: dict[Hashable, _Team] = {}
        self._same: dict[Hashable, _Team] = {}
        # what others keep is not on a device; hosts have more or fewer devices
        self._are_unlike = bool(self._kept or self._padding or self._summed or self._uses_hosts)

    def of(self, replica: Replica, schedule: Schedule, number: int) -> Iterator[tuple[str, SimulatedWorker]]:
        """The devices of a replica with their workers; `number`: index of the replica's schedule."""
        team = self._team(replica, schedule, number)
        for rank, stage in enumerate(replica.first_stages):
            for index, device in enumerate(stage.virtual_device.devices):
                place = replica.index, rank, index, device
                own = self._own(team, *place) if self._are_unlike else None
                key = rank, index, own
                if key not in team.workers:
                    team.workers[key] = self._worker(team, *place[1:], own or self._own(team, *place))
                yield device, team.workers[key]

    def _team(self, replica: Replica, schedule: Schedule, number: int) -> _Team:
        groups = tuple(self._works.likeness(group) for stage in replica.stages for group in stage.groups)
        stages = [(own.ops, own.parameters, own.program, own.shards, own.shares, own.split) for own in replica.stages]
        rows = tuple(stop - start for start, stop in self._rows[replica.index])
        same = number, groups, rows, id(replica.edges), tuple(id(part) for own in stages for part in own)
        if same not in self._same:  # else what they are made of, which is long, is one for both
            look = number, groups, rows, replica.edges, tuple(stages)
            if look not in self._teams:
                self._teams[look] = _Team(number, rows, tuple(self._places(replica, schedule, number, rows)))
            self._same[same] = self._teams[look]
        return self._same[same]

    def _places(self, replica: Replica, schedule: Schedule, number: int, rows: Sequence[int]) -> Iterator[tuple[_Place, ...]]:
        """Per rank, its stages."""
        if number not in self._of_kind:
            self._in_flight[number] = count_in_flight(schedule)
            kinds = (Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT)
            self._of_kind[number] = {(a.stage, a.kind) for actions in schedule.ranks for a in actions if a.kind in kinds}
        places = [self._place(stage, stage_key(replica, stage, self._of_kind[number]), sorted(set(rows))) for stage in replica.stages]
        return (tuple(places[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))

    def _place(self, stage: Stage, key: StageKey, sizes: Sequence[int]) -> _Place:
        known = self._keys.setdefault(key, key)  # one object for equal keys, which are long
        return _Place(stage, known, stage.groups, tuple((size, stage.rows(size)) for size in sizes))

    def _own(self, team: _Team, replica: int, rank: int, index: int, device: str) -> _Own:
        places = team.ranks[rank]
        at, stages = self._plan.rank_of[device], [place.stage.index for place in places]
        kept = self._kept.get(at, _NOTHING)
        positions = [index % place.stage.split for place in places]
        keys = [place.key for place in places]
        summed = self._summed.get(at, self._nothing_summed)
        freed = tuple(summed.freed(replica, stage) for stage in stages)
        return _Own(
            kept=tuple(self._held.kept(*own, kept) for own in _together_and_alone(keys, positions)) if kept else (),
            sums=tuple(summed.sums(replica, stage) for stage in stages),
            freed=freed,
            freed_last=summed.freed_in_all - sum(freed),
            lost=(summed.together.lost, *(summed.lost_of(replica, stage) for stage in stages)),
            casting=summed.together.seconds(self._prices.cluster.by_name[device]),
            sent=float(summed.together.on_their_way),
            sent_late=float(summed.together.on_their_way_late),
            brought=tuple(self._gathering.of(device, stage) for stage in stages),
            throughout=self._gathering.bytes_throughout(device),
            given=self._publishing.get(device, 0.0) + self._gathering.throughout(device),
            num_given=self._num_given[device],
            in_buckets=self._filling.get(at, 0),
            padding=self._padding[at],
            apart=self._apart.get(at, (0.0, 0.0)),
            published=float(most_at_once(self._published.get(at, ()))),
            num_on_host=self._num_on_host[self._prices.cluster.by_name[device].host] if self._uses_hosts else 1,
        )

    def _worker(self, team: _Team, rank: int, index: int, device: str, own: _Own) -> SimulatedWorker:
        places, rows, costs = team.ranks[rank], team.rows, self._prices.costs
        positions = [index % place.stage.split for place in places]
        states = [self._held.of(*held) for held in _together_and_alone([place.key for place in places], positions)]
        held, *alone = (_State.of(whole, kept) for whole, kept in zip_longest(states, own.kept, fillvalue=_NO_SUMS))
        known = self._prices.cluster.by_name[device]
        works = tuple(self._work(places, index, device, own, is_only=len(rows) == 1))
        away = self._in_flight[team.number][rank] * max((work.away for _, work in works), default=0.0)
        last = dict(works)[places[0].stage.index, rows[-1]]
        hides = 0.0 if self._gathers or places[0].key.defers_weights else last.backward_input + last.backward_weight
        moved = held.returning + self._exposed(known, held.leaving, hides)
        shared = costs.host_bandwidth / own.num_on_host
        on_host = host_step_seconds(known, shared, held.stepped_there, moved) if held.stepped_there else 0.0
        lost, *lost_of = own.lost
        return SimulatedWorker(
            team.number,
            rank,
            tuple(place.stage.index for place in places),
            rows,
            works,
            replace(
                held.use,
                weights=held.use.weights + own.in_buckets,
                gradients=held.use.gradients - held.unbucketed + own.padding + lost,
            ),
            held.unbucketed,
            held.casts,
            tuple(state.use.total + num_bytes for state, num_bytes in zip(alone, lost_of, strict=True)),
            optimizer_seconds(known, *held.stepped) + own.casting + on_host + own.given,
            costs.capacity(known),
            known.reached_handling,
            held.on_host + away,
            sent=own.sent,
            throughout=own.throughout,
            apart=own.apart,
            sent_late=own.sent_late,
            freed=own.freed,
            freed_last=own.freed_last,
            published=own.published,
            num_given=own.num_given,
        )

    def _exposed(self, device: Device, num_bytes: float, hides: float) -> float:
        """Bytes of gradients still on their way to the host after the last backward pass: at least a bucket."""
        return max(num_bytes - hides * device.host_link, min(num_bytes, float(self._prices.costs.bucket_bytes)))

    def _work(
        self, places: Sequence[_Place], index: int, device: str, own: _Own, *, is_only: bool
    ) -> Iterator[tuple[tuple[int, int], Work]]:
        """By stage and rows of a micro-batch; `is_only`: whether there is one micro-batch, so that its backward pass is the last."""
        for place, sums, brought in zip(places, own.sums, own.brought, strict=True):
            group, position = divmod(index, place.stage.split)
            for size, rows in place.rows:
                work = self._works.of(place.key, place.groups[group], position, rows[index], brought.fetched, sums, is_only=is_only)
                yield (place.stage.index, size), brought(work)


Held = tuple[tuple[StageKey, ...], tuple[int, ...]]
"""Stages of a device, and its position in the split group of each."""


def _together_and_alone(keys: Sequence[StageKey], positions: Sequence[int]) -> Iterator[Held]:
    """All stages of a device, and each of them."""
    own = tuple(first_alike(key.shards, position) for key, position in zip(keys, positions, strict=True))
    yield tuple(keys), own
    yield from (((key,), (position,)) for key, position in zip(keys, own, strict=True))


def stage_key(replica: Replica, stage: Stage, kinds: Collection[tuple[int | None, Kind]] = ()) -> StageKey:
    """A stage of a plan as its price sees it; `kinds`: which stages of the schedule have R or W actions."""
    received = tuple((edge.source, edge.tensors) for edge in replica.edges if edge.target == stage.index)
    handed_on = dict.fromkeys(name for edge in replica.edges if edge.source == stage.index for name in edge.tensors)
    part = Part(stage.ops, stage.parameters, received, tuple(handed_on))
    recomputes, defers = ((stage.index, kind) in kinds for kind in (Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT))
    offloads = stage.offloads and not recomputes  # what R computes, B takes soon
    return StageKey(part, stage.recomputed, stage.shards, stage.overlap, recomputes, defers, offloads)


@dataclass(frozen=True, slots=True)
class _State:
    """Bytes of the parameters of a device."""

    use: MemoryUse  # while gradients are alive
    stepped: tuple[float, float, float]  # weights, gradients and other optimizer state that an optimizer step reads and writes
    unbucketed: float  # of the gradients in no bucket
    casts: float  # of gradients in the optimizer's dtype, where that differs, beyond those in no bucket
    stepped_there: float  # what an optimizer step on the host reads and writes
    leaving: float  # of gradients to the host
    returning: float  # of weights back
    on_host: float  # of what lives on the host, and of the gradients that arrive there

    @staticmethod
    def of(whole: _Sums, kept: _Sums) -> _State:
        sums = [float(own + more) for own, more in zip(whole, kept, strict=True)]
        return _State(MemoryUse(*sums[:3]), (sums[3], sums[4], sums[5]), *sums[6:])


class _ParameterMemory:
    """Bytes of parameters on a device, with gradients and optimizer state; what several stages of a device hold counts once.

    Args:
        unlike: those whose keepers send them as they are stepped.
        are_shared: whether some are sharded over owners.
    """

    def __init__(
        self, prices: Prices, plan: Plan, bucketed: frozenset[str], let_go: frozenset[str], unlike: frozenset[str], *, are_shared: bool
    ) -> None:
        self._prices, self._plan, self._bucketed, self._let_go, self._are_shared = prices, plan, bucketed, let_go, are_shared
        self._unlike = unlike
        self._known: dict[Held, tuple[Mapping[str, Parameter], _Sums, dict[tuple[str, int], _Sums]]] = {}

    def of(self, keys: tuple[StageKey, ...], positions: tuple[int, ...]) -> _Sums:
        """What the device has if it keeps nothing of what is sharded over owners."""
        return self._of(keys, positions)[1]

    def kept(self, keys: tuple[StageKey, ...], positions: tuple[int, ...], kept: Mapping[str, int]) -> _Sums:
        """What it has more for the elements that it keeps of each parameter."""
        parameters, _, known = self._of(keys, positions)
        for name, number in kept.items():
            if (name, number) not in known and name in parameters:
                rows = (self._row(name, parameters[name], own) for own in (number, 0))
                known[name, number] = tuple(more - less for more, less in zip(*rows, strict=True))
        return _added(known[each] for each in kept.items() if each[0] in parameters)

    def _of(
        self, keys: tuple[StageKey, ...], positions: tuple[int, ...]
    ) -> tuple[Mapping[str, Parameter], _Sums, dict[tuple[str, int], _Sums]]:
        """The parameters; their sums with nothing kept; and what is known of some with so many elements kept."""
        if (keys, positions) not in self._known:
            found: dict[str, Parameter] = {}
            for key, position in zip(keys, positions, strict=True):
                own = self._prices.local(key.part.ops, key.shards, position) if key.shards else self._prices
                found |= {name: own.graph.parameter_by_name[name] for name in key.part.parameters}
            kept = 0 if self._are_shared else None
            self._known[keys, positions] = found, _added(self._row(name, known, kept) for name, known in found.items()), {}
        return self._known[keys, positions]

    def _row(self, name: str, known: Parameter, kept: int | None) -> _Sums:
        """The numbers of `_State` of one parameter; `kept`: elements that the device keeps, if it is sharded over owners."""
        state, training = self._plan.state_of(name), self._prices.training
        own = None if state.kept.sharding == "stage" else kept
        held = made = state_bytes(known, state, training=training)
        if own is not None:
            held = state_bytes(known, state, training=training, kept=own)
        if own is not None and name in self._unlike:
            held = _with_sent(held, state, own, is_whole=own == known.spec.num_elements)
        if state.gradient is None or not made.gradient:
            return held.compute, made.gradient, held.optimizer, 0, 0, 0, made.gradient, 0, 0, 0, 0, held.on_host
        is_bucketed, num_kept = name in self._bucketed, known.spec.num_elements if own is None else own
        num_bytes = num_kept * DTYPE_BYTES[state.kept.dtype]
        gradient = filled_up(made.gradient) if is_bucketed else made.gradient
        uses, unbucketed = (held.compute, gradient, held.optimizer), 0 if is_bucketed else made.gradient
        if state.kept.home == "host":
            returns = state.compute.home == "device"  # else it comes in each pass
            moved = held.gradient, returns * num_kept * DTYPE_BYTES[state.compute.dtype]
            return *uses, 0, 0, 0, unbucketed, 0, num_bytes * (2 + state.num_optimizer_tensors), *moved, held.on_host + num_bytes
        weights = num_bytes + (held.compute if state.is_copied else 0)
        is_cast = state.casts_gradient and name not in self._let_go
        casts = max(0, num_bytes - unbucketed) if is_cast else 0  # what is apart is let go as it is cast
        return *uses, weights, held.gradient, num_bytes * state.num_optimizer_tensors, unbucketed, casts, 0, 0, 0, 0


def _with_sent(held: StateBytes, state: ParameterState, kept: int, *, is_whole: bool) -> StateBytes:
    """The bytes of a keeper that sends its part as it is stepped: a copy where that is elsewhere; what it holds all of, it also reads."""
    reads_there, num_bytes = state.compute.home == "host", kept * DTYPE_BYTES[state.compute.dtype]
    sent = 0 if state.kept.home == state.compute.home else kept * DTYPE_BYTES[state.kept.dtype]
    if reads_there:
        return replace(held, on_host=held.on_host - num_bytes + sent)
    return replace(held, compute=sent + (num_bytes if is_whole else 0))


def _added(rows: Iterable[_Sums]) -> _Sums:
    return tuple(map(sum, zip(_NO_SUMS, *rows, strict=True)))
