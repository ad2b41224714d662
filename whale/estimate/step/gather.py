"""All that takes part in a step of a plan: its devices with their work, the links between them, and what travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from whale.estimate.prices.prices import Prices
from whale.estimate.step.alike import Wire
from whale.estimate.step.sync import buckets
from whale.estimate.step.wires import Links, Sums, message_wires, sum_wires
from whale.estimate.step.workers import Worker, Workers
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.schedules import Edges, alike_schedules, edge_pairs, forward_schedules_of, releases, schedules_of
from whale.schedules.holding import Releases


@dataclass(frozen=True)
class Gathered:
    """The whole step, device by device.

    Attributes:
        devices: names, in the order of the plan's ranks.
        workers: of the devices.
        links: name and bytes per second of each.
        wires: everything that travels; their `kind` is a `Crosses` or a `Sums`.
        schedules: that replicas follow.
        pairs: per schedule, the pairs of stages between which tensors are handed on.
    """

    devices: tuple[str, ...]
    workers: tuple[Worker, ...]
    links: tuple[tuple[str, float], ...]
    wires: tuple[Wire, ...]
    schedules: tuple[Schedule, ...]
    pairs: tuple[tuple[tuple[int, int], ...], ...]

    def releases_of(self, schedule: int, rank: int) -> Releases:
        """When a rank of a schedule knows that what it sent was taken; worked out once."""
        if (schedule, rank) not in self._releases:
            own = self.schedules[schedule]
            self._releases[schedule, rank] = releases(own, Edges.of(own, self.pairs[schedule]), rank)
        return self._releases[schedule, rank]

    @cached_property
    def _releases(self) -> dict[tuple[int, int], Releases]:
        return {}

    @cached_property
    def summed_stages(self) -> Mapping[int, tuple[int, ...]]:
        """Per wire that is a collective, the stages whose gradients it sums."""
        found = {}
        for number, wire in enumerate(self.wires):
            if isinstance(wire.kind, Sums):
                found[number] = tuple(sorted({stage for stages, *_ in set(wire.roles) for stage in stages}))  # type: ignore[attr-defined]
        return found


def gather(plan: Plan, prices: Prices) -> Gathered:
    """Collects a plan's workers, links and wires.

    Raises:
        ScheduleError: a schedule of the plan would not run to its end.
    """
    shared = buckets(plan, prices)
    schedules = schedules_of(plan) if prices.training else forward_schedules_of(plan)
    makers, found = Workers(plan, prices, shared, schedules), dict[str, Worker]()
    alike = alike_schedules(plan)
    for replica, schedule, number in zip(plan.replicas, schedules, alike, strict=True):
        found |= makers.of(replica, schedule, number)
    links = Links(prices)
    rank = plan.rank_of
    wires = (*message_wires(plan, prices, links, rank), *sum_wires(plan, prices, links, shared.summed))
    workers = tuple(found[device] for device in plan.devices)
    followed = tuple(dict(zip(alike, schedules, strict=True)).values())
    pairs = tuple({number: edge_pairs(replica) for number, replica in zip(alike, plan.replicas, strict=True)}.values())
    return Gathered(plan.devices, workers, tuple(links.found), wires, followed, pairs)
