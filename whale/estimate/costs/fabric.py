"""What a group of devices has to talk over: the links inside its hosts, and the way from host to host.

host a                    host b
a/0 -- a/1                b/0 -- b/1        inside    the slowest of the links inside a host
 |      |                  |      |
card ===================== card             between   all devices of a host together, at most its card
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from whale.ir.cluster import Cluster, Link


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of one group.

    Attributes:
        num_devices: of the group.
        num_hosts: on which they are.
        on_host: devices of the group on a host, the most of any.
        rails: devices of the group on a host, the fewest of any: so many ways lead from host to host.
        inside: bytes per second from a device to the next one of its host; infinite where no host has two.
        between: bytes per second from a host to the next one, over all rails together; infinite for one host.
        inside_latency, between_latency: seconds of one hop.
    """

    num_devices: int
    num_hosts: int
    on_host: int
    rails: int
    inside: float
    between: float
    inside_latency: float
    between_latency: float


def fabric(cluster: Cluster, devices: Sequence[str]) -> Fabric:
    """The links of some devices.

    What the devices of a host share, a card or a bus, is taken as if all of them talked at once, as they do in a step: each
    has an equal part of it.
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
    return Fabric(len(devices), len(members), max(counts), min(counts), inside, between, inside_latency, between_latency)


def _between(cluster: Cluster, firsts: Sequence[str]) -> Iterable[Link]:
    """The unlike links from host to host, all around, of one device of each."""
    if not cluster.pairs and cluster.network is not None:  # it is the one that there is
        return (cluster.network,)
    return dict.fromkeys(cluster.link(a, b) for a, b in pairwise([*firsts, firsts[0]]))


def _part_of_card(cluster: Cluster, host: str, count: int) -> float:
    card = cluster.card(host)
    return inf if card is None else card * count / len(cluster.host_by_name[host].devices)
