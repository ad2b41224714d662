"""When the runtime sums gradients: the buckets of a plan, and when in the last backward pass each is ready."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Plan, Replica, Stage
from whale.schedules import alike_schedules
from whale.sharding.buckets import Buckets, plan_buckets
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
