"""Communication by the alpha-beta model: one message, an edge between stages, collectives over unlike links."""

from __future__ import annotations

from collections.abc import Sequence

from whale.estimate.costs.collectives import fastest_way
from whale.estimate.costs.fabric import fabric
from whale.estimate.costs.line import Line
from whale.ir.cluster import Cluster, Link


def p2p_seconds(cluster: Cluster, source: str, target: str, num_bytes: float) -> float:
    """Time of one message between two devices; nothing where they are one."""
    return 0.0 if source == target else cluster.link(source, target).seconds(num_bytes)


def edge_line(link: Link, payload: Line, num_messages: int) -> Line:
    """Seconds to send a payload (bytes by rows) over a link in so many messages, by rows."""
    return Line(num_messages * link.latency + payload.fixed / link.bandwidth, payload.per_row / link.bandwidth)


def all_reduce_seconds(cluster: Cluster, devices: Sequence[str], num_bytes: float) -> float:
    """Time of an all-reduce of `num_bytes` on each of these devices."""
    return all_reduce_line(cluster, devices, Line(num_bytes), 1, 0.0).fixed


def all_reduce_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rows: float) -> Line:
    """Seconds of so many all-reduces of a payload (bytes by rows, together), by rows; each goes the way that is fastest at `num_rows`."""
    return _collective_line(cluster, devices, payload, num_messages, num_rows, 2)


def all_gather_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rows: float) -> Line:
    """Seconds of so many all-gathers that give every device the whole payload (bytes by rows, together), by rows.

    Half of an all-reduce. A reduce-scatter of the payload costs the same.
    """
    return _collective_line(cluster, devices, payload, num_messages, num_rows, 1)


def all_to_all_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rows: float) -> Line:
    """Seconds of so many all-to-alls of a payload (bytes by rows, together) that lies in parts before and after, by rows.

    Each device has 1/k of the payload and sends 1/k of that to each of the k - 1 others, one after another: to those of its host
    inside, to the rest by its part of the way out.
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
