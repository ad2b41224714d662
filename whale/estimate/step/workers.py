"""The devices of a plan as workers: what each does and holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.estimate.costs.compute import host_step_seconds, optimizer_seconds
from whale.estimate.memory.memory import state_bytes
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.sync import Gathering, SummedHere, deferred, giving_seconds, most_at_once, summed_by_rank
from whale.estimate.step.work import StageKey, Work, Works, first_alike
from whale.ir.cluster import NO_HANDLING, Device, Handling
from whale.ir.graph import DTYPE_BYTES, Parameter
from whale.ir.plan import Plan, Replica, Stage
from whale.ir.schedule import Kind, Schedule
from whale.schedules import count_in_flight
from whale.sharding.buckets import Bucket, Buckets, BucketSlot, filled_up

_NOTHING: Mapping[str, int] = {}


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
    sent: float = 0.0  # bytes of buckets in flight, from the first last backward pass to the optimizer's step
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


class Workers:
    """Makes workers of the devices of replicas, cached."""

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
        self._padding = _padding_of_pieces(bucket for bucket in buckets.summed if bucket.form.sharding == "stage")
        self._summed = dict(summed_by_rank(plan, buckets.summed))
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
        self._held = _ParameterMemory(prices, plan, bucketed, let_go)
        self._rows = plan.all_micro_batch_rows(plan.planned_rows)
        self._of_kind: dict[int, set[tuple[int | None, Kind]]] = {}
        self._in_flight: dict[int, tuple[int, ...]] = {}
        self._keys: dict[StageKey, StageKey] = {}
        self._known: dict[Hashable, tuple[SimulatedWorker, ...]] = {}
        self._same: dict[Hashable, tuple[SimulatedWorker, ...]] = {}

    def of(self, replica: Replica, schedule: Schedule, number: int) -> Iterator[tuple[str, SimulatedWorker]]:
        """The devices of a replica with their workers; equal replicas on equal devices share them.

        `number`: index of the replica's schedule.
        """
        groups = tuple(self._works.likeness(group) for stage in replica.stages for group in stage.groups)
        stages = [(own.ops, own.parameters, own.program, own.shards, own.shares, own.split) for own in replica.stages]
        # what others keep is not here; hosts have more or fewer devices
        is_own = self._kept or self._padding or self._summed or self._uses_hosts
        own_state = replica.index if is_own else None
        same = number, groups, self._sizes(replica), id(replica.edges), tuple(id(part) for own in stages for part in own), own_state
        if same not in self._same:  # else what they are made of, which is long, is one for both
            look = number, groups, self._sizes(replica), replica.edges, tuple(stages), own_state
            if look not in self._known:
                self._known[look] = tuple(self._found(replica, schedule, number))
            self._same[same] = self._known[look]
        return zip((device for stage in replica.first_stages for device in stage.virtual_device.devices), self._same[same], strict=True)

    def _sizes(self, replica: Replica) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self._rows[replica.index])

    def _found(self, replica: Replica, schedule: Schedule, number: int) -> Iterator[SimulatedWorker]:
        """The workers of a replica, rank by rank."""
        if number not in self._of_kind:
            self._in_flight[number] = count_in_flight(schedule)
            kinds = (Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT)
            self._of_kind[number] = {(a.stage, a.kind) for actions in schedule.ranks for a in actions if a.kind in kinds}
        rows = self._sizes(replica)
        places = [self._place(stage, stage_key(replica, stage, self._of_kind[number]), sorted(set(rows))) for stage in replica.stages]
        for rank in range(schedule.num_ranks):
            own = [places[stage] for stage in schedule.stages_of(rank)]
            for index, device in enumerate(own[0].stage.virtual_device.devices):
                yield self._worker(replica.index, number, rank, own, index, device, rows)

    def _place(self, stage: Stage, key: StageKey, sizes: Sequence[int]) -> _Place:
        known = self._keys.setdefault(key, key)  # one object for equal keys, which are long
        return _Place(stage, known, stage.groups, tuple((size, stage.rows(size)) for size in sizes))

    def _worker(
        self, replica: int, number: int, rank: int, own: Sequence[_Place], index: int, device: str, rows: tuple[int, ...]
    ) -> SimulatedWorker:
        positions = [index % place.stage.split for place in own]
        kept = self._kept.get(self._plan.rank_of[device], _NOTHING) if self._kept else None
        held = self._held.of([place.key for place in own], positions, kept)
        known, costs = self._prices.cluster.by_name[device], self._prices.costs
        shared = costs.host_bandwidth / self._num_on_host[known.host]
        at = self._plan.rank_of[device]
        summed = self._summed.get(at, SummedHere(self._plan, at))
        freed = tuple(summed.freed(replica, place.stage.index) for place in own)
        works = tuple(self._work(replica, own, index, device, summed if len(rows) == 1 else None))
        away = self._in_flight[number][rank] * max((work.away for _, work in works), default=0.0)
        last = dict(works)[own[0].stage.index, rows[-1]]
        hides = 0.0 if self._gathers or own[0].key.defers_weights else last.backward_input + last.backward_weight
        moved = held.returning + self._exposed(known, held.leaving, hides)
        on_host = host_step_seconds(known, shared, held.stepped_there, moved) if held.stepped_there else 0.0
        return SimulatedWorker(
            number,
            rank,
            tuple(place.stage.index for place in own),
            rows,
            works,
            replace(
                held.use,
                weights=held.use.weights + self._filling.get(at, 0),
                gradients=held.use.gradients - held.unbucketed + self._padding.get(at, 0) + summed.lost,
            ),
            held.unbucketed,
            held.casts,
            tuple(
                self._held.of([place.key], [position], kept).use.total + summed.lost_of(replica, place.stage.index)
                for place, position in zip(own, positions, strict=True)
            ),
            optimizer_seconds(known, *held.stepped) + summed.seconds(known) + on_host + self._given(device),
            costs.capacity(known),
            known.reached_handling,
            held.on_host + away,
            sent=float(summed.on_their_way),
            freed=freed,
            freed_last=summed.freed_in_all - sum(freed),
            published=float(most_at_once(self._published.get(at, ()))),
            num_given=self._num_given[device],
        )

    def _exposed(self, device: Device, num_bytes: float, hides: float) -> float:
        """Bytes of gradients still on their way to the host after the last backward pass: at least a bucket."""
        return max(num_bytes - hides * device.host_link, min(num_bytes, float(self._prices.costs.bucket_bytes)))

    def _given(self, device: str) -> float:
        """Seconds in which a device sends and receives weights outside of passes."""
        return self._publishing.get(device, 0.0) + self._gathering.throughout(device)

    def _work(
        self, replica: int, own: Sequence[_Place], index: int, device: str, summed: SummedHere | None
    ) -> Iterator[tuple[tuple[int, int], Work]]:
        for place in own:
            group, position = divmod(index, place.stage.split)
            brought = self._gathering.of(device, place.stage.index)
            spared = 0.0 if summed is None else summed.spared(replica, place.stage.index)
            for size, rows in place.rows:
                yield (place.stage.index, size), brought(self._works.of(place.key, place.groups[group], position, rows[index], spared))


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


class _ParameterMemory:
    """Bytes of parameters on a device, with gradients and optimizer state."""

    def __init__(self, prices: Prices, plan: Plan, bucketed: frozenset[str], let_go: frozenset[str]) -> None:
        self._prices, self._plan, self._bucketed, self._let_go = prices, plan, bucketed, let_go
        self._known: dict[Hashable, _State] = {}

    def of(self, keys: Sequence[StageKey], positions: Sequence[int], kept: Mapping[str, int] | None) -> _State:
        """The bytes; what several stages of a device hold counts once.

        `kept`: elements that the device keeps of what is sharded over owners; None where nothing is.
        """
        positions = [first_alike(key.shards, position) for key, position in zip(keys, positions, strict=True)]
        question = tuple(keys), tuple(positions), id(kept)
        if question not in self._known:
            found: dict[str, Parameter] = {}
            for key, position in zip(keys, positions, strict=True):
                own = self._prices.local(key.part.ops, key.shards, position) if key.shards else self._prices
                found |= {name: own.graph.parameter_by_name[name] for name in key.part.parameters}
            self._known[question] = self._add(found, kept)
        return self._known[question]

    def _add(self, parameters: Mapping[str, Parameter], kept: Mapping[str, int] | None) -> _State:
        rows = [self._row(name, known, kept) for name, known in parameters.items()]
        sums = [float(sum(column)) for column in zip(*rows, strict=True)] or [0.0] * 12
        return _State(MemoryUse(*sums[:3]), (sums[3], sums[4], sums[5]), *sums[6:])

    def _row(self, name: str, known: Parameter, kept: Mapping[str, int] | None) -> tuple[int, ...]:
        """The numbers of `_State` of one parameter."""
        state, training = self._plan.state_of(name), self._prices.training
        own = None if kept is None or state.kept.sharding == "stage" else kept.get(name, 0)
        held = made = state_bytes(known, state, training=training)
        if own is not None:
            held = state_bytes(known, state, training=training, kept=own)
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


def _padding_of_pieces(buckets: Iterable[Bucket]) -> dict[int, int]:
    """Per rank, padding bytes of parameters that fall into pieces, beyond one slot for each parameter."""
    pieces: dict[str, list[tuple[Bucket, BucketSlot]]] = {}
    for bucket in buckets:
        for slot in bucket.slots:
            pieces.setdefault(slot.name, []).append((bucket, slot))
    sizes: dict[tuple[int, str], list[int]] = {}
    for name, found in pieces.items():
        for bucket, slot in found if len(found) > 1 else ():
            for owner in bucket.owners:
                sizes.setdefault((owner, name), []).append((slot.stop - slot.start) * DTYPE_BYTES[bucket.form.dtype])
    padding: dict[int, int] = {}
    for (owner, _), own in sizes.items():
        padding[owner] = padding.get(owner, 0) + sum(map(filled_up, own)) - filled_up(sum(own))
    return {owner: num_bytes for owner, num_bytes in padding.items() if num_bytes}
