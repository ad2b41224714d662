"""When the runtime sums gradients: the buckets of a plan, and when in the last backward pass each is ready; what these take of memory.

gradients      made in the first backward pass |##########|     in the last: |########  |#####   |##  |   what keepers keep stays
on their way                                                                 | +bucket            |       until the optimizer's step
lost           what rounding has lost stays from step to step
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from whale.estimate.costs.op_table import Floats
from whale.estimate.costs.optimizer import rounding_seconds
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.ir.graph import DTYPE_BYTES
from whale.ir.plan import Plan, Replica, Stage
from whale.schedules import alike_schedules
from whale.sharding.buckets import NUM_AT_ONCE, Bucket, Buckets, plan_buckets
from whale.sharding.parameters import parameter_shardings


def buckets(plan: Plan, prices: Prices) -> Buckets:
    """All buckets of a plan; none where nothing is trained."""
    if not prices.training:
        return Buckets()
    alike = alike_schedules(plan)

    def make() -> Buckets:
        found = parameter_shardings(plan, prices.graph, prices.axes if plan.is_sharded else None)
        return plan_buckets(plan, found, prices.graph, alike, prices.costs.bucket_bytes)

    return prices.buckets((alike, plan.devices, plan.parameter_states, plan.keeper_shares, tuple(map(_held, plan.replicas))), make)


def _held(replica: Replica) -> Hashable:
    """What a replica holds where: plans that differ in their micro-batches alone have the same buckets."""
    return tuple(
        (stage.virtual_device, stage.parameters, stage.split, stage.shards, stage.ops if stage.shards else None) for stage in replica.stages
    )


@dataclass(frozen=True)
class Readiness:
    """When in a stage's backward pass gradients are final: once it has come to the first op that reads the parameter.

    Attributes:
        backward: seconds of each op.
        first: per parameter, the position among the ops of the first that reads it.
    """

    backward: Floats
    first: Mapping[str, int]

    @cached_property
    def total(self) -> float:
        """Seconds of all ops."""
        return float(self.backward.sum())

    def share(self, names: Sequence[str]) -> float:
        """The share of the pass after which the gradients of some parameters are final."""
        start = min((self.first[name] for name in names if name in self.first), default=0)
        return float(self.backward[start:].sum()) / self.total if self.total > 0 else 1.0


def readiness(prices: Prices, stage: Stage, num_rows: int, first: Mapping[str, int]) -> Readiness:
    """When the gradients of a stage are final.

    Args:
        num_rows: of the micro-batch on the stage's first device.
        first: `first_uses` of the stage.
    """
    seconds = prices.seconds(prices.cluster.by_name[stage.virtual_device.devices[0]], num_rows)
    return Readiness((seconds.backward_fixed + num_rows * seconds.backward_per_row)[prices.positions(stage.ops)], first)


def first_uses(prices: Prices, stage: Stage) -> dict[str, int]:
    """Per parameter of a stage, the position among its ops of the first that reads it."""
    graph, found = prices.graph, dict[str, int]()
    for position, name in enumerate(stage.ops):
        for parameter in graph.parameters_among(graph.by_name[name].inputs):
            if parameter.kind == "parameter":
                found.setdefault(parameter.name, position)
    return found


@dataclass(frozen=True)
class SummedHere:
    """The buckets of a device whose gradients are rounded, or let go when their sum has come, in the order in which they start.

    Attributes:
        plan: of them.
        rank: of the device.
        buckets: all of them.
    """

    plan: Plan
    rank: int
    buckets: tuple[Bucket, ...] = ()

    @property
    def lost(self) -> int:
        """Bytes of what rounding has lost."""
        return sum(bucket.lost_bytes for bucket in self.buckets)

    def lost_of(self, replica: int, stage: int) -> int:
        """Bytes of that, of the parameters that a stage of the device uses."""
        return sum(bucket.lost_bytes for bucket in self.buckets if (replica, stage) in bucket.stages)

    @property
    def on_their_way(self) -> int:
        """Bytes of what travels in a type of its own, and of the bucket that gathers gradients that are let go."""
        rounded = [bucket for bucket in self.buckets if bucket.sum_dtype]
        return most_at_once(bucket.sent_bytes for bucket in rounded) + max((bucket.num_bytes for bucket in self._let_go), default=0)

    def seconds(self, device: Device) -> float:
        """What rounding takes."""
        rounded = (bucket for bucket in self.buckets if bucket.sum_dtype)
        return sum(rounding_seconds(device, own.num_bytes, own.sent_bytes, feeds_back=own.feeds_back) for own in rounded)

    def freed(self, replica: int, stage: int) -> float:
        """Bytes that are let go by the end of the last backward pass of a stage, less what the device keeps of them."""
        done = self._of_stage(replica, stage)[:-NUM_AT_ONCE]
        return float(sum(self._made(bucket) - self._keeps(bucket) for bucket in done))

    @cached_property
    def freed_in_all(self) -> float:
        """Bytes that are let go by the optimizer's step, less what the device keeps of them."""
        return float(sum(self._made(bucket) - self._keeps(bucket) for bucket in self._let_go))

    def spared(self, replica: int, stage: int) -> float:
        """Bytes of gradients that are never there together with the others, where the first backward pass of a stage is the last."""
        own = self._of_stage(replica, stage)
        if any(self.plan.state_of(name).is_gathered for bucket in own for name in bucket.names):  # these start when the pass is done
            return 0.0
        made, kept = ([0, *accumulate(count(bucket) for bucket in own)] for count in (self._made, self._keeps))
        num = NUM_AT_ONCE + 1
        most = max((made[at + num] - made[at] + kept[at] for at in range(len(made) - num)), default=made[-1])
        return float(made[-1] - most)

    @cached_property
    def _let_go(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.form.sharding == "owners")

    def _of_stage(self, replica: int, stage: int) -> tuple[Bucket, ...]:
        """Those that start in the last backward pass of a stage."""
        return tuple(bucket for bucket in self._let_go if bucket.is_at_one_place and (replica, stage) in bucket.stages)

    def _made(self, bucket: Bucket) -> int:
        """Bytes of the gradients in a bucket."""
        return sum(slot.stop - slot.start for slot in bucket.slots) * DTYPE_BYTES[bucket.form.dtype]

    def _keeps(self, bucket: Bucket) -> int:
        """Bytes of them that the device keeps on itself, as its optimizer takes them."""
        forms = ((self.plan.state_of(slot.name).kept, dict(slot.keepers).get(self.rank, 0)) for slot in bucket.slots)
        return sum(num_elements * DTYPE_BYTES[form.dtype] for form, num_elements in forms if form.home == "device")


def summed_by_rank(plan: Plan, buckets: Iterable[Bucket]) -> Iterator[tuple[int, SummedHere]]:
    """Per rank that has such buckets, these."""
    found: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        for owner in bucket.owners if bucket.sum_dtype or bucket.form.sharding == "owners" else ():
            found.setdefault(owner, []).append(bucket)
    return ((owner, SummedHere(plan, owner, tuple(own))) for owner, own in found.items())


def most_at_once(sizes: Iterable[int]) -> int:
    """Bytes of the buckets that are on their way at once, at most."""
    found = [*sizes]
    return max((sum(found[at:][:NUM_AT_ONCE]) for at in range(len(found))), default=0)
