"""Cost of the copies of `memory.redundancy`: host memory, and seconds of a step.

    step | own copies | those that are sent | compared | step | ...        each waits for the slowest rank

No rank computes meanwhile. Updated weights in flight (`communication.defer_weights`) may share links with the copies, which is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whale.estimate.costs.compute import copy_seconds
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Plan
from whale.sharding.parameters import parameter_shardings
from whale.sharding.second_owners import SecondOwners, second_owners
from whale.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Redundancy:
    """The copies of a plan's state."""

    survives: str  # what may be lost: ``host`` or ``device``
    every: int  # steps from one copying to the next
    seconds: float  # of a copying: to copy, to send, and to compare the state with the copies as the next step begins
    link: str  # the side of a link that is busy longest; empty where nothing is sent
    sent_bytes: tuple[str, int]  # of a copying, by the device that sends most, and its name
    host_bytes: tuple[tuple[str, int, int], ...]  # by host, the memory that copies take, and what a fault leaves there besides

    @property
    def step_seconds(self) -> float:
        """Of the mean step."""
        return self.seconds / self.every

    def __str__(self) -> str:
        host, most, left = max(self.host_bytes, key=lambda each: each[1])
        when, mean = (
            ("each step", "") if self.every == 1 else (f"each {self.every} steps", f", {format_seconds(self.step_seconds)} of a step")
        )
        device, num_bytes = self.sent_bytes
        sent = f"{device} sends {format_bytes(num_bytes)}, the busiest link is {self.link}" if self.link else "nothing is sent"
        return (
            f"survives the loss of any one {self.survives}: copies after {when} take {format_seconds(self.seconds)}{mean} ({sent}), "
            f"and {format_bytes(most)} of the memory of {host}, {format_bytes(left)} more at a fault"
        )


def redundancy_of(plan: Plan, prices: Prices, every: int) -> Redundancy | None:
    """What copies after each so many-th step take; None where there is no other device.

    Args:
        plan: the plan.
        prices: of its graph on its cluster.
        every: steps.
    """
    cluster = prices.cluster
    devices = [*plan.devices, *(device.name for device in cluster.devices if device.name not in plan.rank_of)]
    hosts = [cluster.by_name[name].host for name in devices]
    if len(devices) < 2:
        return None
    shardings = parameter_shardings(plan, prices.graph, prices.axes if plan.is_sharded else None)
    found = second_owners(plan, prices.graph, shardings, hosts)
    memory, left = dict.fromkeys(hosts, 0), dict.fromkeys(hosts, 0)
    for device, host in enumerate(hosts):
        memory[host] += found.host_bytes(device)
        left[host] += found.fault_bytes(device)
    own = [copy_seconds(cluster.by_name[name], found.copied_bytes[device]) for device, name in enumerate(devices)]
    busy = dict[str, float]()
    for side, seconds in _sides(found, devices, prices):
        busy[side] = busy.get(side, 0.0) + seconds
    link = max(busy, key=busy.__getitem__, default="")
    first = max(range(len(devices)), key=found.sent_bytes.__getitem__)
    return Redundancy(
        found.survives,
        every,
        2 * max(own) + busy.get(link, 0.0),
        link,
        (devices[first], found.sent_bytes[first]),
        tuple((host, memory[host], left[host]) for host in memory),
    )


def sendable_bytes(prices: Prices) -> float:
    """Of the mean step, if all of the state were sent to another host; 0 where no copies are made, or there is no other host."""
    every = prices.costs.copies_every
    if not every or len(prices.cluster.hosts) < 2:
        return 0.0
    return sum(each.spec.num_elements * prices.state_of[each.name].element_bytes for each in prices.graph.parameters) / every


def _sides(found: SecondOwners, devices: list[str], prices: Prices) -> Iterator[tuple[str, float]]:
    """The sides of links that are busy while copies are sent, and for how long, what each device does for its messages among it."""
    cluster = prices.cluster
    for source, target in found.targets.items():
        names, num_bytes = (devices[source], devices[target]), found.sent_bytes[source]
        link, hosts = cluster.link(*names), tuple(cluster.by_name[name].host for name in names)
        if hosts[0] == hosts[1] and link.shared:
            yield f"{hosts[0]} bus", link.seconds(num_bytes)
        for name, host, side in zip(names, hosts, ("out", "in"), strict=True):
            handling = cluster.by_name[name].reached_handling
            if not (hosts[0] == hosts[1] and link.shared):
                yield f"{name} {side}", max(link.seconds(num_bytes), handling.seconds + handling.per_byte * num_bytes)
            if hosts[0] != hosts[1] and (card := cluster.card(host)) is not None:
                yield f"{host} card {side}", num_bytes / card
