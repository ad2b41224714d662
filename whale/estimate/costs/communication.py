"""Communication by the alpha-beta model: one message, an edge between stages, collectives over heterogeneous links.

host a                    host b
a/0 -- a/1                b/0 -- b/1        inside    the slowest of the links inside a host
 |      |                  |      |
card ===================== card             between   all devices of a host together, at most its card

A collective uses the fastest algorithm, as NCCL does; among CPUs, or parts of one GPU, a ring, as Gloo does:

ring            every byte passes every device, one after the other             least traffic on equal links, long latency
tree            up to a root and down again                                     latency grows with the logarithm
hierarchical    inside each host, across the hosts by all rails, inside again   least traffic between hosts

Messages also take compute time (handling) of CPU ranks at their ends, whose core moves the bytes; 0 where not measured:

device   |  compute  |handles|  compute  |
link                 |==== message ====>|
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf, log2

from whale.estimate.costs.line import Line
from whale.hardware.catalogue import CPU
from whale.ir.cluster import Cluster, Handling, Link


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of one group of devices; latencies in seconds of one hop."""

    num_devices: int
    num_hosts: int
    on_host: int  # most devices of the group on a host
    rails: int  # fewest devices of the group on a host, which limits the paths from host to host
    inside: float  # bytes per second from a device to the next one of its host; infinite where no host has two
    between: float  # bytes per second from a host to the next one, over all rails; infinite for one host
    inside_latency: float
    between_latency: float
    is_ring: bool = False  # whether collectives use rings only


def fabric(cluster: Cluster, devices: Sequence[str]) -> Fabric:
    """The links of some devices.

    What the devices of a host share, a card or a bus, is divided as if all of them sent at once, as they do in a step.
    """
    members, by_name = dict[str, list[str]](), cluster.by_name
    for name in devices:
        members.setdefault(by_name[name].host, []).append(name)
    inside, inside_latency, between, between_latency = inf, 0.0, inf, 0.0
    counts = [len(names) for names in members.values()]
    for host, names in members.items():
        if len(names) > 1:
            known = cluster.host_by_name[host]
            inside = min(inside, known.link.bandwidth / (len(known.devices) if known.link.shared else 1))
            inside_latency = max(inside_latency, known.link.latency)
    if len(members) > 1:
        for link in _between(cluster, [names[0] for names in members.values()]):
            between = min(between, min(counts) * link.bandwidth)
            between_latency = max(between_latency, link.latency)
        between = min(between, *(_part_of_card(cluster, host, len(names)) for host, names in members.items()))
    is_ring = any(by_name[name].model == CPU or by_name[name].sharers > 1 for name in devices)
    return Fabric(len(devices), len(members), max(counts), min(counts), inside, between, inside_latency, between_latency, is_ring)


def _between(cluster: Cluster, firsts: Sequence[str]) -> Iterable[Link]:
    """The distinct links of a ring over hosts, by one device of each."""
    if not cluster.pairs and cluster.network is not None:  # it is the one that there is
        return (cluster.network,)
    return dict.fromkeys(cluster.link(a, b) for a, b in pairwise([*firsts, firsts[0]]))


def _part_of_card(cluster: Cluster, host: str, count: int) -> float:
    card = cluster.card(host)
    return inf if card is None else card * count / len(cluster.host_by_name[host].devices)


@dataclass(frozen=True, slots=True)
class Route:
    """One algorithm of a collective; transfers inside and between hosts overlap, in pieces."""

    inside: float  # multiple of the payload that passes each device's link inside its host
    between: float  # multiple of the payload that leaves each host, over all rails
    latency: float  # seconds independent of the bytes

    def seconds_per_byte(self, over: Fabric) -> float:
        return max(self.inside / over.inside, self.between / over.between)


def fastest_way(over: Fabric, num_passes: int, num_bytes: float) -> Route:
    """The fastest algorithm of a collective.

    Args:
        over: the group's links.
        num_passes: 2 of an all-reduce, 1 of an all-gather or reduce-scatter.
        num_bytes: of the whole payload.
    """
    return min(_ways(over, num_passes), key=lambda way: way.latency + way.seconds_per_byte(over) * num_bytes)


def within_and_between(over: Fabric, num_copies: int) -> Route:
    """Groups of devices, each on hosts of its own, that each reduce-scatter a payload, and then all-reduce each part between them."""
    hosts, inside, between = over.num_hosts, over.on_host - 1, 2 * (num_copies - 1)
    crossed = between / num_copies + (hosts - num_copies) / hosts  # the latter is the reduce-scatter of a group on several hosts
    return Route(inside / over.on_host, crossed, inside * over.inside_latency + between * over.between_latency)


def _ways(over: Fabric, num_passes: int) -> Iterator[Route]:
    count, hosts, inner, outer = over.num_devices, over.num_hosts, over.inside_latency, over.between_latency
    if count < 2:
        yield Route(0.0, 0.0, 0.0)
        return
    each = num_passes * (count - 1) / count
    crossings = hosts if hosts > 1 else 0
    yield Route(each, each if crossings else 0.0, each * ((count - crossings) * inner + crossings * outer))
    if over.is_ring:
        return
    if num_passes == 2:
        depth = ceil(log2(over.on_host)) * inner + ceil(log2(hosts)) * outer
        yield Route(2.0, 2.0 if crossings else 0.0, 2 * depth)
    if hosts > 1 and over.on_host > 1:
        inside, between = num_passes * (over.on_host - 1), num_passes * (hosts - 1)
        yield Route(inside / over.on_host, between / hosts, inside * inner + between * outer)


@dataclass(frozen=True, slots=True)
class Volume:
    """Messages and bytes (by rows) that one device sends and receives, both directions summed."""

    num_messages: float = 0.0
    num_bytes: Line = field(default_factory=Line)

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.num_messages + other.num_messages, self.num_bytes + other.num_bytes)

    def line(self, handling: Handling) -> Line:
        """Compute seconds that it takes of a device, by rows."""
        return Line(self.num_messages * handling.seconds) + self.num_bytes * handling.per_byte

    def seconds(self, handling: Handling) -> float:
        """The same, without rows."""
        return self.line(handling).fixed


def all_to_all_volume(num_devices: int, payload: Line) -> Volume:
    """Per device, of an all-to-all."""
    return Volume(2.0 * (num_devices - 1), payload * (2 * (num_devices - 1) / num_devices**2))


def ring_volume(num_devices: int, payload: Line, num_passes: int) -> Volume:
    """Per device, of passes around a ring, in and out: 2 of an all-reduce, 1 of an all-gather or reduce-scatter."""
    both = 2.0 * num_passes * (num_devices - 1)
    return Volume(both, payload * (both / num_devices))


def edge_line(link: Link, payload: Line, num_messages: int) -> Line:
    """Seconds of sending a payload (bytes by rows) over a link in `num_messages`, by rows."""
    return Line(num_messages * link.latency + payload.fixed / link.bandwidth, payload.per_row / link.bandwidth)


def all_reduce_seconds(cluster: Cluster, devices: Sequence[str], num_bytes: float) -> float:
    """Seconds of an all-reduce of `num_bytes` on each of these devices."""
    return all_reduce_line(cluster, devices, Line(num_bytes), 1, 0.0).fixed


def all_reduce_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rows: float) -> Line:
    """Seconds of `num_messages` all-reduces of a payload (bytes by rows, together), by rows, with the fastest algorithm at `num_rows`."""
    return _collective_line(cluster, devices, payload, num_messages, num_rows, 2)


def all_gather_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rows: float) -> Line:
    """Seconds of all-gathers that give every device the whole payload, or of its reduce-scatters: half of an all-reduce."""
    return _collective_line(cluster, devices, payload, num_messages, num_rows, 1)


def all_to_all_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rows: float) -> Line:
    """Seconds of all-to-alls of a payload (bytes by rows, together), by rows.

    Each device has 1/k of the payload and sends 1/k of that to each of the k - 1 others in turn: inside its host, or over
    its share of the path out.
    """
    count = len(devices)
    if count < 2:
        return Line()
    over = fabric(cluster, devices)
    near, far = over.on_host - 1, count - over.rails
    latency = near * over.inside_latency + far * over.between_latency
    return Line(num_messages * latency) + payload * ((near / over.inside + far * over.rails / over.between) / count**2)


def _collective_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rows: float, num_passes: int) -> Line:
    if len(devices) < 2:
        return Line()
    over = fabric(cluster, devices)
    way = fastest_way(over, num_passes, payload.at(num_rows) / max(1, num_messages))
    return Line(num_messages * way.latency) + payload * way.seconds_per_byte(over)
