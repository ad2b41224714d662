"""How a collective may go, and which way is the fastest: what communication libraries choose among, too.

ring            every byte passes every device, one after the other             least traffic on equal links, long latency
tree            up to a root and down again                                     latency grows with the logarithm
hierarchical    inside each host, across the hosts by all rails, inside again   least traffic between hosts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2

from whale.estimate.costs.fabric import Fabric


@dataclass(frozen=True, slots=True)
class Way:
    """One way for a collective to go; what passes inside and between hosts passes at the same time, in pieces.

    Attributes:
        inside: of each byte of the payload, how much passes the link of each device inside its host.
        between: likewise, how much leaves each host, over all rails together.
        latency: seconds beside the bytes.
    """

    inside: float
    between: float
    latency: float

    def seconds_per_byte(self, over: Fabric) -> float:
        """Seconds that a byte of the payload takes."""
        return max(self.inside / over.inside, self.between / over.between)


def fastest_way(over: Fabric, num_passes: int, num_bytes: float) -> Way:
    """The fastest way of a collective.

    Args:
        over: what the group has to talk over.
        num_passes: 2 of an all-reduce, 1 of an all-gather or reduce-scatter.
        num_bytes: of the whole payload.
    """
    return min(_ways(over, num_passes), key=lambda way: way.latency + way.seconds_per_byte(over) * num_bytes)


def _ways(over: Fabric, num_passes: int) -> Iterator[Way]:
    count, hosts, inner, outer = over.num_devices, over.num_hosts, over.inside_latency, over.between_latency
    if count < 2:
        yield Way(0.0, 0.0, 0.0)
        return
    each = num_passes * (count - 1) / count
    crossings = hosts if hosts > 1 else 0
    yield Way(each, each if crossings else 0.0, each * ((count - crossings) * inner + crossings * outer))
    if num_passes == 2:
        depth = ceil(log2(over.on_host)) * inner + ceil(log2(hosts)) * outer
        yield Way(2.0, 2.0 if crossings else 0.0, 2 * depth)
    if hosts > 1 and over.on_host > 1:
        inside, between = num_passes * (over.on_host - 1), num_passes * (hosts - 1)
        yield Way(inside / over.on_host, between / hosts, inside * inner + between * outer)
