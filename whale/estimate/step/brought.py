"""What gathering weights takes of devices: seconds in each pass, and bytes of what is there beside the parts that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whale.estimate.costs.collectives import fastest_way
from whale.estimate.costs.fabric import fabric
from whale.estimate.costs.handling import ring_volume
from whale.estimate.costs.line import Line
from whale.estimate.memory.passes import Fullest
from whale.estimate.prices.prices import Prices
from whale.estimate.step.work import Work
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.sharding.buckets import Bucket
from whale.sharding.visits import visits_of


@dataclass(frozen=True, slots=True)
class Brought:
    """What a pass through a stage takes more.

    Attributes:
        forward, backward: seconds.
        num_bytes: at most: weights that are there, and those on their way.
    """

    forward: float = 0.0
    backward: float = 0.0
    num_bytes: float = 0.0

    def __call__(self, work: Work) -> Work:
        """The work of the stage with it."""
        if not self.num_bytes:
            return work
        beside, more = work.beside, self.num_bytes
        first, later = (self._fuller(each) for each in (beside.first, beside.later))
        again = beside.again + more if beside.again else 0.0
        beside = replace(beside, forward=beside.forward + more, again=again, first=first, later=later)
        return replace(work, forward=work.forward + self.forward, backward_input=work.backward_input + self.backward, beside=beside)

    def _fuller(self, fullest: Fullest) -> Fullest:
        return replace(fullest, working=fullest.working + self.num_bytes)


class Gathering:
    """What the devices of a plan gather.

    Args:
        plan: the plan.
        prices: of its graph on its cluster.
        buckets: that are gathered.
        schedules: per replica.
    """

    def __init__(self, plan: Plan, prices: Prices, buckets: Sequence[Bucket], schedules: Sequence[Schedule]) -> None:
        self._plan, self._buckets, self._graph = plan, buckets, prices.graph
        self._seconds = [giving_seconds(plan, prices, bucket) for bucket in buckets]
        self._visits = visits_of(buckets, prices.graph, schedules) if buckets else {}

    def throughout(self, device: str) -> float:
        """Seconds of what a device gathers before a step."""
        visits = self._visits.get(self._plan.rank_of[device])
        return 0.0 if visits is None else sum(self._seconds[number][device] for number in visits.throughout)

    def of(self, device: str, stage: int) -> Brought:
        """Of a pass of a device through a stage."""
        visits = self._visits.get(self._plan.rank_of[device])
        if visits is None:
            return Brought()
        order = visits.forward.get(stage, ())
        seconds = sum(self._seconds[number][device] for number in order)
        there = sum(self._buckets[number].num_bytes for number in visits.throughout)
        return Brought(seconds, seconds, there + self._most(order))

    def _most(self, order: Sequence[int]) -> float:
        """Bytes of the buckets that are there at once: until the last op that reads them, with the copy that came, and the next."""
        reads, last_reads, most = self._graph.first_reads, self._graph.last_reads, 0
        sizes = [self._buckets[number].num_bytes for number in order]
        first = [min((reads[name] for name in self._buckets[number].names if name in reads), default=0) for number in order]
        last = [max((last_reads[name] for name in self._buckets[number].names if name in last_reads), default=0) for number in order]
        for index, size in enumerate(sizes):
            there = sum(other for other, end in zip(sizes[: index + 1], last, strict=False) if end >= first[index])
            most = max(most, there + size + sum(sizes[index + 1 : index + 2]))
        return float(most)


def giving_seconds(plan: Plan, prices: Prices, bucket: Bucket) -> Mapping[str, float]:
    """Per device, the seconds in which keepers give the other owners of a bucket what these read."""
    devices, num_bytes = [plan.devices[owner] for owner in bucket.owners], float(bucket.num_bytes)
    over = fabric(prices.cluster, devices)
    way, volume = fastest_way(over, 1, num_bytes), ring_volume(len(devices), Line(num_bytes), 1)
    seconds = way.seconds_per_byte(over) * num_bytes + len(bucket.runs) * (way.latency + prices.costs.message_seconds)
    return {device: seconds + volume.seconds(prices.cluster.by_name[device].handling) for device in devices}
