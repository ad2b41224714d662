"""Assigns devices to replicas and virtual devices: large memories where most is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations

from whale.ir.cluster import Cluster, Device, Link
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.strategy import Placed

MAX_PERMUTED = 4  # up to this many devices, and device types, every order is tried

SEARCHED = "chosen by the search"


@dataclass(frozen=True)
class Placement:
    """One way to place all replicas."""

    rule: str  # that it follows, in words
    replicas: tuple[Placed, ...]  # the devices of each
    idle: tuple[str, ...]  # devices left over


@dataclass(frozen=True)
class Likeness:
    """Equal for replicas on equal devices with equal links."""

    devices: tuple[tuple[Device, int], ...]  # per device its type, and the number of its host in the replica
    links: tuple[tuple[int, int, Link], ...]  # inside the hosts, and between those with a link of their own: two host numbers, and the link
    network: Link | None  # the link between all other hosts; None for one host


def likeness_of(placed: Placed, cluster: Cluster) -> Likeness:
    devices = [cluster.by_name[name] for names in placed for name in names]
    local = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in devices))}
    inside = ((number, number, cluster.host_by_name[host].link) for host, number in local.items())
    own = ((sorted((local[a], local[b])), link) for (a, b), link in cluster.pairs if a in local and b in local)
    between = sorted(((low, high, link) for (low, high), link in own), key=lambda each: each[:2])
    return Likeness(
        tuple((device.kind, local[device.host]) for device in devices),
        (*inside, *between),
        cluster.network if len(local) > 1 else None,
    )


@dataclass(frozen=True)
class DevicePool:
    """The devices that a model divided by scopes may use."""

    cluster: Cluster  # that they belong to; its other devices stay idle
    taken: Cluster  # a cluster of them
    likely: Callable[[Sequence[Placed]], float] | None = None  # seconds on these devices; with it, other orders of devices are priced too
    stated: tuple[Placed, ...] = ()  # the devices of each rank of each replica, if fixed; else empty

    def placements(
        self, pipeline: PipelineShape, memory: Sequence[float], work: Sequence[float] | None, *, prefer_intra_node: bool
    ) -> tuple[Placement, ...]:
        """The placements worth pricing, the one by memory first; arguments as of `placements`."""
        if self.stated:
            return (_placed(SEARCHED, self.cluster, self.stated),)
        found = placements(self.taken, pipeline, memory, work, prefer_intra_node=prefer_intra_node)
        likely = self.likely
        if likely is not None:
            every = list(every_placement(self.taken, pipeline, prefer_intra_node=prefer_intra_node))
            if len(self.taken.devices) > MAX_PERMUTED:  # to price each takes long
                every = sorted(every, key=lambda each: likely(each.replicas))[:1]
            found = tuple({each.replicas: each for each in (*every, *found)}.values())
        outside = tuple(device.name for device in self.cluster.devices if device.name not in self.taken.by_name)
        return tuple(replace(each, idle=each.idle + outside) for each in found)


def placements(
    cluster: Cluster, pipeline: PipelineShape, memory: Sequence[float], work: Sequence[float] | None, *, prefer_intra_node: bool
) -> tuple[Placement, ...]:
    """The distinct placements worth pricing, the one by memory first.

    Args:
        memory: per rank, bytes that one of its devices would hold; only the order counts.
        work: per rank, FLOPs of one of its devices; None where the stages are not cut yet.
    """
    groups, idle = device_groups(cluster, pipeline.num_devices, prefer_intra_node=prefer_intra_node)
    rules: list[tuple[str, Sequence[float], Callable[[Device], float]]] = [
        ("large memories where most is held", memory, lambda device: device.memory)
    ]
    if work is not None:
        rules.append(("fast devices where most is computed", work, _speed))
    rules.append(("the cluster's order", [0.0] * pipeline.num_ranks, lambda device: 0.0))
    found: dict[tuple[Placed, ...], Placement] = {}
    widths = tuple(max(map(pipeline.width, pipeline.stages_of(rank))) for rank in range(pipeline.num_ranks))
    idle_names = tuple(device.name for device in idle)
    for rule, demand, supply in rules:
        replicas = tuple(_assign(group, pipeline.devices, demand, supply) for group in groups)
        found.setdefault(replicas, Placement(rule, replicas, idle_names))
    if max(widths) > 1:
        replicas = tuple(_assign_by_hosts(group, pipeline.devices, widths) for group in groups)
        found.setdefault(replicas, Placement("split groups inside hosts", replicas, idle_names))
    return tuple(found.values())


def every_placement(cluster: Cluster, pipeline: PipelineShape, *, prefer_intra_node: bool) -> Iterator[Placement]:
    """On few devices all placements up to equivalence; on more, device types along the pipeline in every order."""
    kinds = list(dict.fromkeys(device.kind for device in cluster.devices))
    if len(cluster.devices) <= MAX_PERMUTED:
        seen = set[object]()
        for devices in permutations(cluster.devices, len(cluster.devices) // pipeline.num_devices * pipeline.num_devices):
            replicas = tuple(_in_turn(group, pipeline.devices) for group in _groups(devices, pipeline.num_devices))
            look = sorted(tuple(tuple(sorted((kinds.index(own.kind), own.host) for own in rank)) for rank in each) for each in replicas)
            if str(look) not in seen:
                seen.add(str(look))
                yield _placed("the devices in another order", cluster, _names(replicas))
        return
    groups, _ = device_groups(cluster, pipeline.num_devices, prefer_intra_node=prefer_intra_node)
    for order in permutations(kinds) if 1 < len(kinds) <= MAX_PERMUTED else ():
        place = {kind: number for number, kind in enumerate(order)}
        own = (sorted(group, key=lambda device: place[device.kind]) for group in groups)
        yield _placed("kinds in another order", cluster, _names(tuple(_in_turn(group, pipeline.devices) for group in own)))


def _groups(devices: Sequence[Device], size: int) -> Iterator[Sequence[Device]]:
    return (devices[start : start + size] for start in range(0, len(devices), size))


def _in_turn(devices: Sequence[Device], sizes: Sequence[int]) -> tuple[tuple[Device, ...], ...]:
    """Devices for the ranks, one rank after another."""
    stops = list(accumulate(sizes))
    return tuple(tuple(devices[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True))


def _names(replicas: Sequence[Sequence[Sequence[Device]]]) -> tuple[Placed, ...]:
    return tuple(tuple(tuple(device.name for device in rank) for rank in replica) for replica in replicas)


def _placed(rule: str, cluster: Cluster, replicas: tuple[Placed, ...]) -> Placement:
    used = {name for replica in replicas for rank in replica for name in rank}
    return Placement(rule, replicas, tuple(device.name for device in cluster.devices if device.name not in used))


def device_groups(cluster: Cluster, size: int, *, prefer_intra_node: bool) -> tuple[list[list[Device]], list[Device]]:
    """Devices of each replica, and those left over (the slowest).

    Replicas fill a host first; what remains on the hosts forms replicas across them. Without that preference the devices are
    dealt out in order of memory, so that the replicas are similar.
    """
    num_groups = len(cluster.devices) // size
    if not prefer_intra_node:
        devices = sorted(cluster.devices, key=lambda device: (-device.memory, -_speed(device)))
        used, idle = devices[: num_groups * size], devices[num_groups * size :]
        return [used[index::num_groups] for index in range(num_groups)], idle
    groups: list[list[Device]] = []
    rest: list[Device] = []
    for host in cluster.hosts:
        devices = sorted(host.devices, key=lambda device: -_speed(device))
        whole = len(devices) // size * size
        groups += [devices[start : start + size] for start in range(0, whole, size)]
        rest += devices[whole:]
    num_idle = len(rest) - (num_groups - len(groups)) * size
    slowest = sorted(range(len(rest)), key=lambda index: (_speed(rest[index]), -index))[:num_idle]
    left = [device for index, device in enumerate(rest) if index not in slowest]
    groups += [left[start : start + size] for start in range(0, len(left), size)]
    order = {device.name: index for index, device in enumerate(cluster.devices)}
    groups = [sorted(group, key=lambda device: order[device.name]) for group in groups]
    return sorted(groups, key=lambda group: order[group[0].name]), [rest[index] for index in sorted(slowest)]


def _speed(device: Device) -> float:
    return device.reached_flops("float32")


def _assign(group: Sequence[Device], sizes: Sequence[int], demand: Sequence[float], supply: Callable[[Device], float]) -> Placed:
    """Ranks with the largest demand choose first, from the devices with the largest supply; ties keep their order."""
    devices = sorted(group, key=lambda device: -supply(device))
    placed: list[tuple[str, ...]] = [()] * len(sizes)
    start = 0
    for rank in sorted(range(len(sizes)), key=lambda rank: -demand[rank]):
        placed[rank] = tuple(device.name for device in devices[start : start + sizes[rank]])
        start += sizes[rank]
    return tuple(placed)


def _assign_by_hosts(group: Sequence[Device], sizes: Sequence[int], widths: Sequence[int]) -> Placed:
    """Ranks with the widest split groups choose first: per group the best-fitting host, similar devices together."""
    free: dict[str, list[Device]] = {}
    for device in sorted(group, key=lambda device: -_speed(device)):
        free.setdefault(device.host, []).append(device)
    placed: list[tuple[str, ...]] = [()] * len(sizes)
    for rank in sorted(range(len(sizes)), key=lambda rank: -widths[rank]):
        for _ in range(sizes[rank] // widths[rank]):
            placed[rank] += tuple(device.name for device in _take(free, widths[rank]))
    return tuple(placed)


def _take(free: dict[str, list[Device]], count: int) -> list[Device]:
    """So many devices, from one host if possible (the one with fewest left); else from the fullest hosts."""
    fitting = [host for host, devices in free.items() if len(devices) >= count]
    if fitting:
        host = min(fitting, key=lambda host: (len(free[host]) % count, len(free[host])))
        taken, free[host] = free[host][:count], free[host][count:]
        return taken
    host = max(free, key=lambda host: len(free[host]))
    taken, free[host] = free[host], []
    return taken + _take(free, count - len(taken))
