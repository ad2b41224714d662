"""Transfers of a step of a plan: messages between stages and collectives of gradients and weights, with their links."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from whale.estimate.costs.communication import Fabric, Route, Volume, fabric, fastest_way, ring_volume, within_and_between
from whale.estimate.costs.line import Line
from whale.estimate.prices.prices import Prices
from whale.estimate.step.alike import Path, Role, Wire
from whale.estimate.step.sync import Readiness, first_uses, readiness
from whale.ir.cluster import Device, Link
from whale.ir.plan import BatchAxis, Plan, Replica, Stage
from whale.sharding.buckets import Bucket
from whale.sharding.crossings import DIRECTIONS, Crossings
from whale.sharding.parameters import Places

_SENDS_AND_RECEIVES: tuple[Role, ...] = ((0,), (1,))
_BEYOND = ", network"  # suffix of a device's link to other hosts


@dataclass(frozen=True, slots=True)
class Crosses:
    """The kind of a message."""

    source: int  # stage
    target: int  # stage
    num_rows: int  # of the micro-batches that it is for
    num_bytes: float  # of all tensors together
    num_messages: int  # one per tensor
    latency: float  # seconds independent of the bytes
    is_local: bool  # whether both stages run on one virtual device, so that the schedule has no action for it

    @property
    def is_backward(self) -> bool:
        return self.source > self.target

    @property
    def volume(self) -> Volume:
        """Handled at either end."""
        return Volume(self.num_messages, Line(self.num_bytes))


@dataclass(frozen=True, slots=True)
class Sums:
    """The kind of a collective of gradients or weights.

    The role of a device in it: its stages; the share of their last backward pass after which it is ready, and whether it
    waits there until all else is done; for weights, the share of their first forward pass before which it needs them.
    """

    num_bytes: float  # of the gradients as they are sent
    num_owners: int  # participants, of each copy that is kept
    num_passes: int  # 2 where each gets the sum, 1 where each gets the part that it keeps
    latency: float  # seconds independent of the bytes
    queue: int  # position among those of the same owners
    gives: bool = False  # whether keepers of weights send them to the others
    num_copies: int = 1  # groups of owners that each keep one, between which a part is summed again

    @property
    def volume(self) -> Volume:
        """Handled by each owner."""
        inside = ring_volume(self.num_owners, Line(self.num_bytes), self.num_passes)
        return inside + ring_volume(self.num_copies, Line(self.num_bytes / self.num_owners), 2) if self.num_copies > 1 else inside


class Links:
    """The sides of devices and host cards, and shared buses of hosts, numbered in order of first use."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._number: dict[tuple[str, str, int | None], int] = {}
        self._alike: dict[Link, int] = {}
        self._between: dict[tuple[str, str], tuple[Link, int]] = {}
        self.found: list[tuple[str, float]] = []

    def path(self, source: str, target: str) -> Path:
        """The links of a message: a side of each device and each host's card; inside a host its bus, if there is one."""
        by_name = self._prices.cluster.by_name
        hosts = by_name[source].host, by_name[target].host
        link, alike = self._link(source, target, hosts)
        if hosts[0] == hosts[1]:
            if link.shared:
                return ((self._side(hosts[0], "bus", link, alike), 1.0),)
            return (self._side(source, "out", link, alike), 1.0), (self._side(target, "in", link, alike), 1.0)
        passed = [self._side(source, "out", link, alike, _BEYOND), self._side(target, "in", link, alike, _BEYOND)]
        passed += [*self._card(hosts[0], "out"), *self._card(hosts[1], "in")]
        return tuple((number, 1.0) for number in passed)

    def _link(self, source: str, target: str, hosts: tuple[str, str]) -> tuple[Link, int]:
        """The link between two devices on these hosts, and a number that equal links share."""
        if hosts not in self._between:
            link = self._prices.link(source, target)
            self._between[hosts] = link, self._alike.setdefault(link, len(self._alike))
        return self._between[hosts]

    def collective(self, devices: Sequence[str], way: Route) -> Path:
        """The links of a collective: inside each host from device to device, and from host to host by all devices."""
        by_name, members = self._prices.cluster.by_name, dict[str, list[str]]()
        for name in devices:
            members.setdefault(by_name[name].host, []).append(name)
        hosts = list(members)
        passed = dict[int, float]()
        for position, (host, names) in enumerate(members.items()):
            inner, alike = self._inside(host)
            if len(names) > 1 and inner.shared:
                passed[self._side(host, "bus", inner, alike)] = way.inside * len(names)
            for name, side in product(names if len(names) > 1 and not inner.shared else (), ("out", "in")):
                passed[self._side(name, side, inner, alike)] = way.inside
            if len(members) == 1:
                continue
            for side, other in (("out", hosts[(position + 1) % len(hosts)]), ("in", hosts[position - 1])):
                link, alike = self._link(names[0], members[other][0], (host, other))
                passed |= {self._side(name, side, link, alike, _BEYOND): way.between / len(names) for name in names}
                passed |= dict.fromkeys(self._card(host, side), way.between)
        return tuple((number, load) for number, load in passed.items() if load > 0)

    def _inside(self, host: str) -> tuple[Link, int]:
        own = self._prices.cluster.host_by_name[host]
        return self._link(own.devices[0].name, own.devices[0].name, (host, host))

    def _card(self, host: str, side: str) -> tuple[int, ...]:
        card = self._prices.cluster.card(host)
        return () if card is None else (self._numbered((f"{host} card", side, None), f"{host} card {side}", card),)

    def _side(self, owner: str, way: str, link: Link, alike: int, where: str = "") -> int:
        key = owner, way, alike
        known = self._number.get(key)
        return self._numbered(key, f"{owner} {way}{where}", link.bandwidth) if known is None else known

    def _numbered(self, key: tuple[str, str, int | None], name: str, bandwidth: float) -> int:
        if key not in self._number:
            self._number[key] = len(self.found)
            self.found.append((name, bandwidth))
        return self._number[key]


@dataclass(frozen=True, slots=True)
class _Handed:
    """A message from one device of a replica to another, by (stage, position); shared by equal replicas. `kind` lacks the latency."""

    source: tuple[int, int]
    target: tuple[int, int]
    kind: Crosses


def message_wires(plan: Plan, prices: Prices, links: Links, number: Mapping[str, int]) -> Iterator[Wire]:
    """What stages send to one another, in both directions."""
    known, kinds, batch_axes = dict[Hashable, tuple[_Handed, ...]](), dict[tuple[int, float], Crosses](), dict(plan.batch_axes)
    for replica, rows in zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True):
        sizes = tuple(sorted({stop - start for start, stop in rows}))
        look = replica.edges, sizes, replica.pipeline.stage_rank, tuple((own.shares, own.split, own.shards) for own in replica.stages)
        if look not in known:
            known[look] = tuple(_handed(replica, sizes, prices, batch_axes))
        devices = [stage.virtual_device.devices for stage in replica.stages]
        for each in known[look]:
            source, target = (devices[stage][position] for stage, position in (each.source, each.target))
            if source == target:
                continue  # it stays where it is
            latency = prices.link(source, target).latency
            if (id(each), latency) not in kinds:
                seconds = each.kind.num_messages * (latency + prices.costs.message_seconds)
                kinds[id(each), latency] = replace(each.kind, latency=seconds)
            yield Wire(kinds[id(each), latency], (number[source], number[target]), _SENDS_AND_RECEIVES, links.path(source, target))


def _handed(replica: Replica, sizes: Sequence[int], prices: Prices, batch_axes: Mapping[str, BatchAxis]) -> Iterator[_Handed]:
    """What the stages of a replica send, with micro-batches of these numbers of rows."""
    names = [stage.virtual_device.devices for stage in replica.stages]
    number = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(names)))}
    position = [{number[name]: place for place, name in enumerate(own)} for own in names]
    crossings = Crossings(replica, prices.graph, number, batch_axes)
    for edge, direction, size in product(replica.edges, DIRECTIONS if prices.training else DIRECTIONS[:1], sizes):
        source, target = (edge.source, edge.target) if direction == "forward" else (edge.target, edge.source)
        volumes = {tensor: crossings.value(edge, source, tensor, size).hull.volume for tensor in edge.tensors}
        found: dict[tuple[int, int], tuple[float, int]] = {}
        for tensor, move in crossings.moves(edge, size, direction):
            pair = position[source][move.source], position[target][move.target]
            num_bytes, count = found.get(pair, (0.0, 0))
            found[pair] = num_bytes + prices.outputs[tensor].at(size) * move.region.volume / volumes[tensor], count + 1
        for (own, other), figures in sorted(found.items()):
            yield _Handed((source, own), (target, other), Crosses(source, target, size, *figures, 0.0, replica.is_local(edge)))


def sum_wires(plan: Plan, prices: Prices, links: Links, given: Iterable[Bucket], summed: Iterable[Bucket]) -> Iterator[Wire]:
    """Collectives of weights (`given`) and of gradients (`summed`), each by its fastest algorithm."""
    queues: dict[tuple[int, ...], int] = {}
    fabrics: dict[tuple[int, ...], Fabric] = {}
    paths: dict[tuple[tuple[int, ...], Route], Path] = {}
    roles = _Roles(plan, prices)
    for gives, bucket in (*((True, each) for each in given), *((False, each) for each in summed)):
        queues[bucket.owners] = position = queues.get(bucket.owners, -1) + 1
        devices = [plan.devices[owner] for owner in bucket.owners]
        if bucket.owners not in fabrics:
            fabrics[bucket.owners] = fabric(prices.cluster, devices)
        num_passes, copies = 1 if bucket.runs else 2, max(1, len(bucket.groups))
        over = fabrics[bucket.owners]
        way = fastest_way(over, num_passes, bucket.sent_bytes) if copies == 1 else within_and_between(over, copies)
        if (bucket.owners, way) not in paths:
            paths[bucket.owners, way] = links.collective(devices, way)
        latency = (way.latency + prices.costs.message_seconds) * max(1, len(bucket.runs) // copies)
        num_owners = max(map(len, bucket.groups), default=len(bucket.owners))
        kind = Sums(bucket.sent_bytes, num_owners, num_passes, latency, position, gives, copies)
        yield Wire(kind, bucket.owners, roles.of(bucket, gives=gives), paths[bucket.owners, way])


@dataclass(frozen=True, slots=True)
class _Owner:
    """What equivalent owners of a bucket share."""

    stages: tuple[int, ...]  # of theirs that use it
    look: int | None  # of the last of them, whose share is theirs; None where they reach it at different points


class _Roles:
    """The roles of the owners of buckets: see `Sums`."""

    def __init__(self, plan: Plan, prices: Prices) -> None:
        self._plan, self._prices = plan, prices
        self._looks: dict[tuple[tuple[str, ...], Device, int], int] = {}
        self._same: dict[tuple[int, int, int, int], int] = {}
        self._ready: list[Readiness] = []
        self._owners: dict[tuple[Places, tuple[int, ...], bool], tuple[tuple[_Owner, ...], tuple[int, ...]]] = {}
        self._first: dict[tuple[str, ...], dict[str, int]] = {}
        self._last_rows = [stop - start for *_, (start, stop) in plan.all_micro_batch_rows(plan.planned_rows)]

    def of(self, bucket: Bucket, *, gives: bool) -> tuple[Role, ...]:
        key = bucket.stages, bucket.owners, bucket.is_at_one_place
        if key not in self._owners:
            self._owners[key] = self._alike(bucket)
        unlike, owners = self._owners[key]
        looks = dict.fromkeys(own.look for own in unlike if own.look is not None)
        if gives:
            before: dict[int | None, float] = {look: self._ready[look].share_before(bucket.names) for look in looks}
            given = [(own.stages, before.get(own.look, 0.0), False) for own in unlike]
            return tuple(given[number] for number in owners)
        waits = any(self._plan.state_of(name).is_shared_out for name in bucket.names)  # then sums start when the whole pass is done
        shares: dict[int | None, float] = {look: 1.0 if waits else self._ready[look].share(bucket.names) for look in looks}
        roles = [(own.stages, shares.get(own.look, 1.0), not bucket.is_at_one_place) for own in unlike]
        return tuple(roles[number] for number in owners)

    def _alike(self, bucket: Bucket) -> tuple[tuple[_Owner, ...], tuple[int, ...]]:
        """The distinct owners of the buckets of these stages, and per owner its index among these."""
        by_replica: dict[int, list[int]] = {}
        for replica, index in bucket.stages:
            by_replica.setdefault(replica, []).append(index)
        numbers, found = dict[_Owner, int](), dict[str, int]()
        for replica, indices in by_replica.items():
            for stage in (self._plan.replicas[replica].stages[index] for index in indices):
                own = _Owner(tuple(indices), self._look(replica, stage) if bucket.is_at_one_place else None)
                found |= dict.fromkeys(stage.virtual_device.devices, numbers.setdefault(own, len(numbers)))
        return tuple(numbers), tuple(found[self._plan.devices[owner]] for owner in bucket.owners)

    def _look(self, replica: int, stage: Stage) -> int:
        """A number for the stage's ops, device type and rows of the last micro-batch, equal for equal ones."""
        kind, num_rows = self._prices.kinds[stage.virtual_device.devices[0]], self._last_rows[replica]
        same = id(stage.ops), id(stage.shares), id(kind), num_rows  # of alike replicas
        if same not in self._same:
            self._same[same] = self._number(stage, kind, stage.rows(num_rows)[0])
        return self._same[same]

    def _number(self, stage: Stage, kind: Device, num_rows: int) -> int:
        look = stage.ops, kind, num_rows
        if look not in self._looks:
            if stage.ops not in self._first:
                self._first[stage.ops] = first_uses(self._prices, stage)
            self._looks[look] = len(self._ready)
            self._ready.append(readiness(self._prices, stage, num_rows, self._first[stage.ops]))
        return self._looks[look]
