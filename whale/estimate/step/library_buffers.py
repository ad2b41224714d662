"""Bytes of the communicators that each device of a plan opens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whale.estimate.costs.communicators import channel_bytes
from whale.estimate.prices.prices import Prices
from whale.estimate.step.alike import Wire
from whale.estimate.step.wires import Crosses
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.sharding.communicators import channels_of


def library_buffers(
    plan: Plan, prices: Prices, groups: Iterable[tuple[int, ...]], wires: Iterable[Wire], schedules: Sequence[Schedule]
) -> list[int]:
    """Bytes on each device, by rank of the plan, where NCCL carries messages.

    Args:
        groups: ranks that sum together, besides all.
        wires: all messages of a step, among others.
        schedules: per replica, with communication.
    """
    found, stated = [prices.everyones_buffers] * len(plan.devices), prices.costs.communicator_bytes
    for ranks in groups:
        if len(ranks) == len(prices.cluster.devices):  # who all share one
            continue
        size = prices.group_buffers([plan.devices[rank] for rank in ranks])
        for rank in ranks:
            found[rank] += size
    ways = ((wire.parties[0], wire.parties[1]) for wire in wires if isinstance(wire.kind, Crosses))
    for shared in channels_of(ways, plan, schedules):
        link = prices.link(*(plan.devices[rank] for rank in shared[0]))
        for rank in shared[0]:
            found[rank] += channel_bytes(link, len(shared)) if stated is None else stated
    return found
