"""Buffers of NCCL's communicators in the memory of devices.

A communicator has as many channels as its slowest link takes, each with buffers for every neighbour. They are made when it is first used
and last as long as it does. Figures were seen by others: 3.28 GB for messages to and from 7 other H100, 32 channels each
(github.com/NVIDIA/nccl/issues/1685); 544 MB for sums of 2 and 688 MB for those of more A100, 24 channels (issues/964). Two ways that
share a communicator take as much as with one each.

Not counted: Gloo's buffers, which are in host memory; and what contexts and kernels of the library take (`Costs.memory_fraction`).
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.estimate.costs.communication import fabric
from whale.ir.cluster import Cluster, Link

MIB = 2**20
WAY_BYTES = 7 * MIB
"""Per channel, of the messages from one rank to another, at either of them."""
PAIR_BYTES = 23 * MIB
"""Per channel, of sums of two ranks."""
GROUP_BYTES = 29 * MIB
"""Per channel, of sums of more ranks: rings and trees have neighbours on both sides."""
CHANNEL_BANDWIDTH = 19e9
"""Bytes per second of two channels: about one link of NVLink, by the catalogue."""
MOST_CHANNELS = 32


def num_channels(bandwidth: float) -> int:
    """Channels of a communicator whose slowest link has so many bytes per second."""
    return min(MOST_CHANNELS, 2 * max(1, round(bandwidth / CHANNEL_BANDWIDTH)))


def group_bytes(cluster: Cluster, devices: Sequence[str]) -> int:
    """Bytes on each device of a communicator of those that sum together."""
    own = fabric(cluster, devices)
    return num_channels(min(own.inside, own.between)) * (PAIR_BYTES if len(devices) == 2 else GROUP_BYTES)


def channel_bytes(link: Link, num_ways: int) -> int:
    """Bytes on either device of a communicator for messages in one or both directions."""
    return num_channels(link.bandwidth) * num_ways * WAY_BYTES
