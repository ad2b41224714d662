"""What travels in a step of a plan: messages between stages and collectives of gradients, with the links that they pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from whale.estimate.costs.collectives import Way, fastest_way
from whale.estimate.costs.fabric import Fabric, fabric
from whale.estimate.costs.handling import Volume, all_reduce_volume
from whale.estimate.costs.line import Line
from whale.estimate.prices.prices import Prices
from whale.estimate.step.alike import Path, Role, Wire
from whale.estimate.step.crossings import Crossings
from whale.estimate.step.sync import first_uses, ready_share
from whale.ir.cluster import Device, Link
from whale.ir.graph import DTYPE_BYTES
from whale.ir.plan import TRAINED, Plan, Stage
from whale.sharding.buckets import Bucket

_SENDS_AND_RECEIVES: tuple[Role, ...] = ((0,), (1,))
_BEYOND = ", network"
"""What a device's link to other hosts is called behind its name, beside that to its neighbours."""


@dataclass(frozen=True, slots=True)
class Crosses:
    """What a message is.

    Attributes:
        source, target: stages.
        num_rows: of the micro-batches that it is for.
        num_bytes: of all tensors together.
        num_messages: in which these go.
        latency: seconds beside the bytes.
        is_local: whether both stages run on one virtual device, so that no action of the schedule stands for it.
    """

    source: int
    target: int
    num_rows: int
    num_bytes: float
    num_messages: int
    latency: float
    is_local: bool

    @property
    def is_backward(self) -> bool:
        return self.source > self.target

    @property
    def volume(self) -> Volume:
        """What either end handles."""
        return Volume(self.num_messages, Line(self.num_bytes))


@dataclass(frozen=True, slots=True)
class Sums:
    """What a collective of gradients is. The role of each device in it: its stages there, after which share of their last backward
    pass it is ready, and whether it waits there until all else is done.

    Attributes:
        num_bytes: of the gradients.
        num_owners: that add them up.
        latency: seconds beside the bytes.
        queue: position among those of the same owners.
    """

    num_bytes: float
    num_owners: int
    latency: float
    queue: int

    @property
    def volume(self) -> Volume:
        """What each owner handles."""
        return all_reduce_volume(self.num_owners, Line(self.num_bytes))


class Links:
    """The sides of devices and of hosts' cards, and what hosts share inside, numbered as they are met."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._number: dict[tuple[str, str, Link | None], int] = {}
        self.found: list[tuple[str, float]] = []

    def path(self, source: str, target: str) -> Path:
        """The links that a message passes: one side of each device, and of each host's card; inside a host its bus, where it has one."""
        by_name, link = self._prices.cluster.by_name, self._prices.link(source, target)
        hosts = by_name[source].host, by_name[target].host
        if hosts[0] == hosts[1] and link.shared:
            return ((self._side(hosts[0], "bus", link, link.bandwidth), 1.0),)
        where = "" if hosts[0] == hosts[1] else _BEYOND
        passed = [self._side(source, "out", link, link.bandwidth, where), self._side(target, "in", link, link.bandwidth, where)]
        if hosts[0] != hosts[1]:
            passed += [*self._card(hosts[0], "out"), *self._card(hosts[1], "in")]
        return tuple((number, 1.0) for number in passed)

    def collective(self, devices: Sequence[str], way: Way) -> Path:
        """The links that a collective passes: inside each host from device to device, and from host to host by all of them."""
        by_name, members = self._prices.cluster.by_name, dict[str, list[str]]()
        for name in devices:
            members.setdefault(by_name[name].host, []).append(name)
        firsts = [names[0] for names in members.values()]
        passed = dict[int, float]()
        for position, (host, names) in enumerate(members.items()):
            inner = self._prices.cluster.host_by_name[host].link
            if len(names) > 1 and inner.shared:
                passed[self._side(host, "bus", inner, inner.bandwidth)] = way.inside * len(names)
            for name, side in product(names if len(names) > 1 and not inner.shared else (), ("out", "in")):
                passed[self._side(name, side, inner, inner.bandwidth)] = way.inside
            if len(members) == 1:
                continue
            for side, other in (("out", firsts[(position + 1) % len(firsts)]), ("in", firsts[position - 1])):
                link = self._prices.link(names[0], other)
                passed |= {self._side(name, side, link, link.bandwidth, _BEYOND): way.between / len(names) for name in names}
                passed |= dict.fromkeys(self._card(host, side), way.between)
        return tuple((number, load) for number, load in passed.items() if load > 0)

    def _card(self, host: str, side: str) -> tuple[int, ...]:
        card = self._prices.cluster.card(host)
        return () if card is None else (self._side(f"{host} card", side, None, card),)

    def _side(self, owner: str, way: str, link: Link | None, bandwidth: float, where: str = "") -> int:
        key = owner, way, link
        if key not in self._number:
            self._number[key] = len(self.found)
            self.found.append((f"{owner} {way}{where}", bandwidth))
        return self._number[key]


def message_wires(plan: Plan, prices: Prices, links: Links, number: Mapping[str, int]) -> Iterator[Wire]:
    """What stages hand to one another, both ways."""
    crossings = Crossings(prices.graph)
    for replica, rows in zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True):
        sizes = sorted({stop - start for start, stop in rows})
        for edge in replica.edges:
            for backward in (False, True) if prices.training else (False,):
                ends = (edge.target, edge.source) if backward else (edge.source, edge.target)
                devices = [replica.stages[end].virtual_device.devices for end in ends]
                for size in sizes:
                    for crossing in crossings.of(edge, replica.stages, size, backward=backward):
                        source, target = devices[0][crossing.source], devices[1][crossing.target]
                        if source == target:
                            continue  # it stays where it is
                        latency = crossing.num_messages * (prices.link(source, target).latency + prices.costs.message_seconds)
                        kind = Crosses(*ends, size, crossing.num_bytes, crossing.num_messages, latency, replica.is_local(edge))
                        yield Wire(kind, (number[source], number[target]), _SENDS_AND_RECEIVES, links.path(source, target))


def sum_wires(plan: Plan, prices: Prices, links: Links, summed: Iterable[Bucket]) -> Iterator[Wire]:
    """Collectives of gradients, of these buckets, each by the way that is fastest alone."""
    queues: dict[tuple[int, ...], int] = {}
    fabrics: dict[tuple[int, ...], Fabric] = {}
    paths: dict[tuple[tuple[int, ...], Way], Path] = {}
    roles = _Roles(plan, prices)
    for bucket in summed:
        queues[bucket.owners] = position = queues.get(bucket.owners, -1) + 1
        devices = [plan.devices[owner] for owner in bucket.owners]
        if bucket.owners not in fabrics:
            fabrics[bucket.owners] = fabric(prices.cluster, devices)
        num_bytes = _gradient_bytes(plan, prices, bucket)
        way = fastest_way(fabrics[bucket.owners], 2, num_bytes)
        if (bucket.owners, way) not in paths:
            paths[bucket.owners, way] = links.collective(devices, way)
        kind = Sums(num_bytes, len(bucket.owners), way.latency + prices.costs.message_seconds, position)
        yield Wire(kind, bucket.owners, roles.of(bucket), paths[bucket.owners, way])


def _gradient_bytes(plan: Plan, prices: Prices, bucket: Bucket) -> float:
    """Bytes of a bucket in the type that the plan's gradients have; buckets count the parameters' own."""
    form = next(state.gradient for state in plan.parameter_states if state.parameters == TRAINED)
    own = prices.graph.parameter_by_name[bucket.names[0]].spec.dtype
    factor = 1.0 if form is None or form.dtype == "own" else DTYPE_BYTES[form.dtype] / DTYPE_BYTES[own]
    return bucket.num_bytes * factor


class _Roles:
    """The roles of the owners of buckets: see `Sums`."""

    def __init__(self, plan: Plan, prices: Prices) -> None:
        self._plan, self._prices = plan, prices
        self._looks: dict[tuple[tuple[str, ...], Device, int], int] = {}
        self._look_of: dict[tuple[int, int], int] = {}
        self._first: dict[tuple[str, ...], dict[str, int]] = {}
        self._last_rows = [stop - start for *_, (start, stop) in plan.all_micro_batch_rows(plan.planned_rows)]

    def of(self, bucket: Bucket) -> tuple[Role, ...]:
        """Per owner, its role."""
        found: dict[str, Role] = {}
        by_replica: dict[int, list[int]] = {}
        for replica, index in bucket.stages:
            by_replica.setdefault(replica, []).append(index)
        shares: dict[int, float] = {}
        for replica, indices in by_replica.items():
            own = tuple(indices)
            for index in own:
                stage, share = self._plan.replicas[replica].stages[index], 1.0
                if bucket.is_at_one_place:
                    look = self._look(replica, stage)
                    if look not in shares:
                        shares[look] = self._share(replica, stage, bucket.names)
                    share = shares[look]
                found |= dict.fromkeys(stage.virtual_device.devices, (own, share, not bucket.is_at_one_place))
        return tuple(found[self._plan.devices[owner]] for owner in bucket.owners)

    def _share(self, replica: int, stage: Stage, names: tuple[str, ...]) -> float:
        if stage.ops not in self._first:
            self._first[stage.ops] = first_uses(self._prices, stage)
        return ready_share(self._prices, stage, self._num_rows(replica, stage), names, self._first[stage.ops])

    def _look(self, replica: int, stage: Stage) -> int:
        """A number that stages of equal ops on equal devices with equally many rows share."""
        place = replica, stage.index
        if place not in self._look_of:
            kind = self._prices.cluster.by_name[stage.virtual_device.devices[0]].kind
            look = stage.ops, kind, self._num_rows(replica, stage)
            self._look_of[place] = self._looks.setdefault(look, len(self._looks))
        return self._look_of[place]

    def _num_rows(self, replica: int, stage: Stage) -> int:
        """Of the last micro-batch, on the first device."""
        return stage.rows(self._last_rows[replica])[0]
