"""Gradient sums and all-gathers of weights: the buckets of a plan, when each is ready, and their time and memory.

gradients      made in the first backward pass |##########|     in the last: |########  |#####   |##  |   what keepers keep stays
in flight                                                                    | +bucket            |       until the optimizer's step
lost           the rounding error stays from step to step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from whale.estimate.costs.communication import all_reduce_seconds, fabric, fastest_way, ring_volume
from whale.estimate.costs.compute import copy_seconds, rounding_seconds
from whale.estimate.costs.line import Floats, Line
from whale.estimate.memory.passes import FetchedWeights, SummedGradients
from whale.estimate.prices.prices import Prices
from whale.estimate.step.work import Work
from whale.ir.cluster import Device
from whale.ir.graph import DTYPE_BYTES, ModelGraph
from whale.ir.plan import Plan, Replica, Stage
from whale.ir.schedule import Schedule
from whale.schedules import alike_schedules
from whale.sharding.buckets import NUM_AT_ONCE, Bucket, Buckets, plan_buckets, visits_of
from whale.sharding.communicators import groups_of
from whale.sharding.parameters import parameter_shardings


def buckets(plan: Plan, prices: Prices) -> Buckets:
    """All buckets of a plan, none where nothing is trained; and who sums together."""
    alike = alike_schedules(plan)

    def make() -> Buckets:
        shardings = parameter_shardings(plan, prices.graph, prices.axes if plan.is_sharded else None)
        found = plan_buckets(plan, shardings, prices.graph, alike, prices.costs.bucket_bytes) if prices.training else Buckets()
        return replace(found, groups=groups_of(plan, prices.graph, shardings))

    groups = plan.keeper_shares, plan.keeper_groups, plan.sync_groups
    return prices.buckets((alike, plan.devices, plan.parameter_states, groups, tuple(map(_held, plan.replicas))), make)


def averaging_seconds(plan: Plan, prices: Prices) -> float:
    """Seconds of the mean step in which weights and optimizer state of sync groups are averaged; all devices wait for it."""
    if plan.rounds is None or not prices.training:
        return 0.0
    taken = dict[str, float]()
    for bucket in buckets(plan, prices).outer:
        devices = [plan.devices[owner] for owner in bucket.owners]
        seconds = all_reduce_seconds(prices.cluster, devices, bucket.num_bytes) * prices.costs.averaged_share
        for device in devices:
            taken[device] = taken.get(device, 0.0) + seconds
    return max(taken.values(), default=0.0)


def deferred(published: Iterable[Bucket], prices: Prices) -> Iterator[Bucket]:
    """The buckets of weights in flight when the next step begins."""
    return (bucket for bucket in published if prices.costs.defers_weights and bucket.is_read_in_place)


def _held(replica: Replica) -> Hashable:
    """What a replica holds where: plans that differ only in their micro-batches have the same buckets."""
    return tuple(
        (stage.virtual_device, stage.parameters, stage.split, stage.shards, stage.ops if stage.shards else None) for stage in replica.stages
    )


@dataclass(frozen=True)
class Readiness:
    """When gradients are final in a stage's backward pass (at the first op that reads the parameter), and when weights are needed."""

    backward: Floats  # seconds of each op
    forward: Floats  # seconds of each op
    first: Mapping[str, int]  # per parameter, the index of the first op that reads it

    @cached_property
    def total(self) -> float:
        return float(self.backward.sum())

    def share(self, names: Sequence[str]) -> float:
        """The share of the backward pass after which the gradients of these parameters are final."""
        return float(self.backward[self._first(names) :].sum()) / self.total if self.total > 0 else 1.0

    def share_before(self, names: Sequence[str]) -> float:
        """The share of the forward pass before the first op that reads one of these parameters."""
        total = float(self.forward.sum())
        return float(self.forward[: self._first(names)].sum()) / total if total > 0 else 0.0

    def _first(self, names: Sequence[str]) -> int:
        return min((self.first[name] for name in names if name in self.first), default=0)


def readiness(prices: Prices, stage: Stage, num_rows: int, first: Mapping[str, int]) -> Readiness:
    """`Readiness` of a stage with `num_rows` on its first device; `first` is `first_uses` of it."""
    seconds = prices.seconds(prices.cluster.by_name[stage.virtual_device.devices[0]], num_rows)
    backward, forward = (
        fixed + num_rows * per_row
        for fixed, per_row in ((seconds.backward_fixed, seconds.backward_per_row), (seconds.forward_fixed, seconds.forward_per_row))
    )
    index = prices.positions(stage.ops)
    return Readiness(backward[index], forward[index], first)


def first_uses(prices: Prices, stage: Stage) -> dict[str, int]:
    """Per parameter of a stage, the index of the first op that reads it."""
    graph, found = prices.graph, dict[str, int]()
    for position, name in enumerate(stage.ops):
        for parameter in graph.parameters_among(graph.by_name[name].inputs):
            if parameter.kind == "parameter":
                found.setdefault(parameter.name, position)
    return found


@dataclass(frozen=True, eq=False)
class SummedBuckets:
    """Buckets that some devices sum, whose gradients are cast, or freed after their sum, in the order in which they start."""

    plan: Plan
    buckets: tuple[Bucket, ...]
    first_reads: Mapping[str, int]  # per parameter, the position in the graph of the first op that reads it

    @cached_property
    def lost(self) -> int:
        """Bytes of rounding errors that each device keeps."""
        return sum(bucket.lost_bytes for bucket in self.buckets)

    @cached_property
    def on_their_way(self) -> int:
        """Bytes of buckets in flight in a dtype of their own, and of the buffer that gathers freed gradients from several places."""
        return most_at_once(bucket.sent_bytes for bucket in self._rounded) + self._gathering(is_late=False)

    @cached_property
    def on_their_way_late(self) -> int:
        """Bytes that this buffer takes more once all backward passes are done."""
        return max(0, self._gathering(is_late=True) - self._gathering(is_late=False))

    def _gathering(self, *, is_late: bool) -> int:
        """Bytes of the largest; passes count those for gradients of one place, which start in them."""
        own = (bucket for bucket, starts_late in zip(self.let_go, self.starts_late, strict=True) if starts_late == is_late)
        return max((bucket.num_bytes for bucket in own if is_late or not bucket.is_at_one_place), default=0)

    def seconds(self, device: Device) -> float:
        """Seconds of casting."""
        return sum(rounding_seconds(device, own.num_bytes, own.sent_bytes, feeds_back=own.feeds_back) for own in self._rounded)

    @cached_property
    def _rounded(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.sum_dtype)

    @cached_property
    def let_go(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.form.sharding == "owners")

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Per bucket of `let_go`, bytes of its gradients."""
        return tuple(sum(slot.stop - slot.start for slot in bucket.slots) * DTYPE_BYTES[bucket.form.dtype] for bucket in self.let_go)

    @cached_property
    def kept(self) -> tuple[Mapping[int, int], ...]:
        """Per bucket of `let_go` and keeper, the bytes of its gradients that stay on the device for its optimizer."""
        return tuple(self._kept(bucket) for bucket in self.let_go)

    def _kept(self, bucket: Bucket) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for slot in bucket.slots:
            form = self.plan.state_of(slot.name).kept
            for keeper, num_elements in slot.keepers if form.home == "device" else ():
                found[keeper] = found.get(keeper, 0) + num_elements * DTYPE_BYTES[form.dtype]
        return found

    @cached_property
    def lost_at(self) -> Mapping[tuple[int, int], int]:
        """By (replica, stage), `lost` of its parameters."""
        found = dict[tuple[int, int], int]()
        for bucket in self.buckets:
            for place in bucket.stages if bucket.lost_bytes else ():
                found[place] = found.get(place, 0) + bucket.lost_bytes
        return found

    @cached_property
    def left_pieces(self) -> tuple[Mapping[int, float], ...]:
        """Per bucket of `let_go`, owners that sum several pieces of its parameters, with the bytes of those whose last piece it has."""
        sizes, last, found = sizes_of_pieces(self.let_go), dict[tuple[int, str], int](), [dict[int, float]() for _ in self.let_go]
        for number, bucket in enumerate(self.let_go) if sizes else ():
            own = [key for name in bucket.names for owner in bucket.owners if (key := (owner, name)) in sizes]
            found[number] = dict.fromkeys((owner for owner, _ in own), 0.0)
            last |= dict.fromkeys(own, number)
        for (owner, name), number in last.items():
            found[number][owner] += sum(sizes[owner, name])
        return tuple(found)

    @cached_property
    def summing(self) -> Mapping[tuple[int, int], Sequence[tuple[SummedGradients, int | None]]]:
        """By (replica, stage), the buckets that start in its last backward pass, with their indices in `let_go`; `freed` is left open."""
        numbers, found = {id(bucket): number for number, bucket in enumerate(self.let_go)}, dict[tuple[int, int], list[Any]]()
        for bucket in self.buckets:
            number = numbers.get(id(bucket))
            if not bucket.is_at_one_place or (number is not None and self.starts_late[number]):
                continue
            place = min(self.first_reads[name] for name in bucket.names)
            gathered, sent = 0 if number is None else self.made[number], bucket.sent_bytes if bucket.sum_dtype else 0
            own = SummedGradients(place, float(gathered), float(sent)), number
            for stage in bucket.stages:
                found.setdefault(stage, []).append(own)
        return found

    @cached_property
    def starts_late(self) -> tuple[bool, ...]:
        """Per bucket of `let_go`, whether it starts only when the pass is done."""
        return tuple(any(self.plan.state_of(name).is_shared_out for name in bucket.names) for bucket in self.let_go)


@dataclass(frozen=True, slots=True)
class SummedHere:
    """What one device keeps of the buckets that it sums."""

    rank: int
    together: SummedBuckets

    def lost_of(self, replica: int, stage: int) -> int:
        """Bytes of rounding errors that are kept, of the parameters of one stage."""
        return self.together.lost_at.get((replica, stage), 0)

    def freed(self, replica: int, stage: int) -> float:
        """Bytes freed by the end of the last backward pass of a stage, less what the device keeps of them."""
        own = [number for _, number in self.together.summing.get((replica, stage), ()) if number is not None]
        return self._freed(own[:-NUM_AT_ONCE])

    @property
    def freed_in_all(self) -> float:
        """Bytes freed by the optimizer's step, less what the device keeps of them."""
        return self._freed(range(len(self.together.let_go)))

    def _freed(self, buckets: Sequence[int]) -> float:
        return float(sum(self.together.made[number] for number in buckets) - sum(map(self._keeps, buckets)))

    def sums(self, replica: int, stage: int) -> tuple[SummedGradients, ...]:
        """What starts in the last backward pass of a stage."""
        return tuple(self._here(*each) for each in self.together.summing.get((replica, stage), ()))

    def _here(self, bucket: SummedGradients, number: int | None) -> SummedGradients:
        if number is None:
            return bucket
        left, kept = self.together.left_pieces[number].get(self.rank), self._keeps(number)
        if left is None:
            return replace(bucket, freed=self.together.made[number] - kept, is_copied=kept > 0)
        # gradients of which pieces are summed stay beside the buffers until the last has arrived
        return replace(bucket, gathered=0.0, sent=bucket.sent + bucket.gathered, freed=left - kept if left else 0.0)

    def _keeps(self, number: int) -> int:
        return self.together.kept[number].get(self.rank, 0)


def sizes_of_pieces(buckets: Iterable[Bucket]) -> Mapping[tuple[int, str], Sequence[int]]:
    """Per rank and parameter of which it sums several pieces, their bytes."""
    found = tuple(buckets)
    numbers, sizes = Counter(slot.name for bucket in found for slot in bucket.slots), dict[tuple[int, str], list[int]]()
    for bucket in found:
        for slot in (each for each in bucket.slots if numbers[each.name] > 1):
            num_bytes = (slot.stop - slot.start) * DTYPE_BYTES[bucket.form.dtype]
            for owner in bucket.owners:
                sizes.setdefault((owner, slot.name), []).append(num_bytes)
    return {key: own for key, own in sizes.items() if len(own) > 1}


def summed_by_rank(plan: Plan, graph: ModelGraph, buckets: Iterable[Bucket]) -> Iterator[tuple[int, SummedHere]]:
    """Per rank, its buckets that are cast or freed."""
    found: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        for owner in bucket.owners if bucket.sum_dtype or bucket.form.sharding == "owners" else ():
            found.setdefault(owner, []).append(bucket)
    together: dict[tuple[int, ...], SummedBuckets] = {}  # equal replicas sum the same
    for owner, own in found.items():
        look = tuple(map(id, own))
        if look not in together:
            together[look] = SummedBuckets(plan, tuple(own), graph.first_reads)
        yield owner, SummedHere(owner, together[look])


def most_at_once(sizes: Iterable[int]) -> int:
    """The most bytes of buckets in flight at once."""
    found = [*sizes]
    return max((sum(found[at:][:NUM_AT_ONCE]) for at in range(len(found))), default=0)


@dataclass(frozen=True, slots=True)
class Brought:
    """What fetching weights adds to a pass through a stage."""

    forward: float = 0.0  # exposed seconds
    backward: float = 0.0  # exposed seconds
    overlapped: float = 0.0  # seconds over the host's link, while ops compute
    fetched: tuple[FetchedWeights, ...] = ()  # but those that are there throughout

    def __call__(self, work: Work) -> Work:
        """Adds it to the work of the stage."""
        if not self.fetched:
            return work
        backward = work.backward_input + max(0.0, self.overlapped - work.backward_input - work.backward_weight) + self.backward
        return replace(work, forward=max(work.forward, self.overlapped) + self.forward, backward_input=backward)


class Gathering:
    """What the devices of a plan gather from keepers, or fetch from their hosts."""

    def __init__(self, plan: Plan, prices: Prices, buckets: Sequence[Bucket], schedules: Sequence[Schedule]) -> None:
        self._plan, self._buckets, self._graph, self._cluster = plan, buckets, prices.graph, prices.cluster
        self._seconds = [_bringing_seconds(plan, prices, bucket) for bucket in buckets]
        self._read = [self._read_bytes(bucket) for bucket in buckets]
        self._there = [self._kept_whole(bucket) for bucket in buckets]
        self._visits = visits_of(buckets, prices.graph, plan, schedules) if buckets else {}
        self._known: dict[Hashable, tuple[FetchedWeights, ...]] = {}  # equal replicas gather in the same order

    def throughout(self, device: str) -> float:
        """Seconds of what a device gathers before a step."""
        visits = self._visits.get(self._plan.rank_of[device])
        return 0.0 if visits is None else sum(self._seconds[number][device] for number in visits.throughout)

    def bytes_throughout(self, device: str) -> float:
        """Bytes of these, from the first pass of a step until all passes and sums are done."""
        rank = self._plan.rank_of[device]
        visits = self._visits.get(rank)
        return 0.0 if visits is None else float(sum(self._taken(number, rank) for number in visits.throughout))

    def of(self, device: str, stage: int) -> Brought:
        """For a pass of a device through a stage."""
        visits = self._visits.get(self._plan.rank_of[device])
        if visits is None:
            return Brought()
        forward, backward = (self._exposed(device, own.get(stage, ())) for own in (visits.forward, visits.backward))
        order = visits.forward.get(stage, ())
        overlapped = sum(self._seconds[number][device] for number in order) - forward
        rank = self._plan.rank_of[device]
        passes = order, visits.backward.get(stage, ()), tuple(self._taken(number, rank) for number in order)
        if passes not in self._known:
            self._known[passes] = tuple(
                self._fetched(number, taken, number in passes[1]) for number, taken in zip(order, passes[2], strict=True)
            )
        return Brought(forward, backward, overlapped, self._known[passes])

    def _taken(self, number: int, rank: int) -> int:
        """Bytes that a device takes of a bucket for the ops that read it."""
        return self._read[number] - self._there[number].get(rank, 0)

    def _read_bytes(self, bucket: Bucket) -> int:
        """Bytes of a bucket as ops read it; among unlike devices it travels as it is stepped."""
        if not bucket.is_unlike:
            return bucket.num_bytes
        sizes = {name: DTYPE_BYTES[self._plan.state_of(name).compute.dtype] for name in bucket.names}
        return sum((slot.stop - slot.start) * sizes[slot.name] for slot in bucket.slots)

    def _kept_whole(self, bucket: Bucket) -> Mapping[int, int]:
        """Per keeper, bytes of the parameters that it keeps all of where ops read them: it takes none of these."""
        found = dict[int, int]()
        if bucket.is_unlike or bucket.form.home == "host":
            return found
        for slot in bucket.slots:
            num_elements = self._graph.parameter_by_name[slot.name].spec.num_elements
            for keeper, number in slot.keepers:
                if number == num_elements:
                    found[keeper] = found.get(keeper, 0) + number * DTYPE_BYTES[bucket.form.dtype]
        return found

    def _exposed(self, device: str, order: Sequence[int]) -> float:
        """Seconds that nothing hides: of the first bucket, and of those that use more than a link of the device alone."""
        is_alone = bool(self._cluster.by_name[device].host_link)
        hidden = (number for number in order[1:] if is_alone and not self._buckets[number].is_shared_out)
        return sum(self._seconds[number][device] for number in order) - sum(self._seconds[number][device] for number in hidden)

    def _fetched(self, number: int, taken: int, is_read_backward: bool) -> FetchedWeights:
        """A bucket as a pass sees it."""
        bucket, reads, last_reads = self._buckets[number], self._graph.first_reads, self._graph.last_reads
        first = min((reads[name] for name in bucket.names if name in reads), default=0)
        last = max((last_reads[name] for name in bucket.names if name in last_reads), default=0)
        return FetchedWeights(float(taken), float(bucket.num_bytes) if bucket.is_shared_out else 0.0, first, last, is_read_backward)


def _bringing_seconds(plan: Plan, prices: Prices, bucket: Bucket) -> Mapping[str, float]:
    """Per device, seconds of fetching a bucket: its own part from its host, where it is there, and the rest from others."""
    found = dict(giving_seconds(plan, prices, bucket)) if bucket.is_shared_out else {}
    for owner in bucket.owners if bucket.form.home == "host" else ():
        device, size = plan.devices[owner], DTYPE_BYTES[bucket.form.dtype]
        own = sum(dict(slot.keepers).get(owner, 0) if slot.keepers else slot.stop - slot.start for slot in bucket.slots)
        found[device] = found.get(device, 0.0) + copy_seconds(prices.cluster.by_name[device], own * size)
    return found


def giving_seconds(plan: Plan, prices: Prices, bucket: Bucket) -> Mapping[str, float]:
    """Per device, seconds in which keepers send the other owners of a bucket what these read."""
    devices, num_bytes = [plan.devices[owner] for owner in bucket.owners], float(bucket.num_bytes)
    over = fabric(prices.cluster, devices)
    way, volume = fastest_way(over, 1, num_bytes), ring_volume(len(devices), Line(num_bytes), 1)
    seconds = way.seconds_per_byte(over) * num_bytes + len(bucket.runs) * (way.latency + prices.costs.message_seconds)
    return {device: seconds + volume.seconds(prices.cluster.by_name[device].reached_handling) for device in devices}
