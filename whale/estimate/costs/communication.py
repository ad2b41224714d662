"""Communication by the alpha-beta model: one message, an edge between stages, collectives over unlike links."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from whale.estimate.costs.line import Line
from whale.ir.cluster import Cluster, Link


def p2p_seconds(cluster: Cluster, source: str, target: str, num_bytes: float) -> float:
    """Time of one message between two devices; nothing where they are one."""
    return 0.0 if source == target else cluster.link(source, target).seconds(num_bytes)


def edge_line(link: Link, payload: Line, num_messages: int) -> Line:
    """Seconds to send a payload (bytes by rows) over a link in so many messages, by rows."""
    return Line(num_messages * link.latency + payload.fixed / link.bandwidth, payload.per_row / link.bandwidth)


def ring_all_reduce_seconds(cluster: Cluster, devices: Sequence[str], num_bytes: float) -> float:
    """Time of a ring all-reduce of `num_bytes` on each of these devices, in this order around the ring.

    2 (k - 1) steps, each moving 1/k of the bytes over every link of the ring at once, so that the slowest rules.
    """
    if len(devices) < 2:
        return 0.0
    part = num_bytes / len(devices)
    ring = zip(devices, (*devices[1:], devices[0]), strict=True)
    return 2 * (len(devices) - 1) * max(cluster.link(a, b).seconds(part) for a, b in ring)


def all_reduce_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int) -> Line:
    """Seconds of so many ring all-reduces of a payload (bytes by rows, together), by rows; the ring's slowest link rules."""
    return _ring_line(cluster, devices, payload, num_messages, 2)


def all_gather_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int) -> Line:
    """Seconds of so many ring all-gathers that give every device the whole payload (bytes by rows, together), by rows.

    k - 1 steps, each moving 1/k of the bytes: half of an all-reduce. A reduce-scatter of the payload costs the same.
    """
    return _ring_line(cluster, devices, payload, num_messages, 1)


def all_to_all_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int) -> Line:
    """Seconds of so many all-to-alls of a payload (bytes by rows, together) that lies in parts before and after, by rows.

    Each device has 1/k of the payload and sends 1/k of that to each of the k - 1 others, one after another; the slowest link
    between any two rules.
    """
    count = len(devices)
    if count < 2:
        return Line()
    links = [cluster.link(a, b) for a, b in combinations(devices, 2)]
    latency, bandwidth = max(link.latency for link in links), min(link.bandwidth for link in links)
    return Line((count - 1) * num_messages * latency) + payload * ((count - 1) / count**2 / bandwidth)


def _ring_line(cluster: Cluster, devices: Sequence[str], payload: Line, num_messages: int, num_rounds: int) -> Line:
    """So many rounds of a ring, each k - 1 steps that move 1/k of the bytes over every link at once."""
    steps = num_rounds * (len(devices) - 1)
    if not steps:
        return Line()
    links = [cluster.link(a, b) for a, b in zip(devices, (*devices[1:], devices[0]), strict=True)]
    latency, bandwidth = max(link.latency for link in links), min(link.bandwidth for link in links)
    return Line(steps * num_messages * latency) + payload * (steps / len(devices) / bandwidth)
