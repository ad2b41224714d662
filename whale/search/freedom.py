"""What the user leaves to the search, and what is fixed."""

from __future__ import annotations

from dataclasses import dataclass

from whale.config import Config, ReplicaBlock
from whale.config.keys import Shares
from whale.ir.cluster import Device
from whale.schedules import BUILDERS, ScheduleShape

FOR_MEMORY = ("none", "blocks", "full")  # for the least memory, each of these is tried instead of recomputing as needed


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which the stages of a replica compute: the schedule's name, and stages per rank."""

    schedule: str
    num_chunks: int = 1

    def alive(self, num_ranks: int, num_micro_batch: int) -> float:
        """Micro-batches in flight on a rank, in the mean of the first and the last."""
        builder, shape = BUILDERS[self.schedule], ScheduleShape(num_ranks, num_micro_batch, self.num_chunks, num_ranks)
        return (builder.peak(shape, 0) + builder.peak(shape, num_ranks - 1)) / 2 / self.num_chunks

    @property
    def recomputes(self) -> bool:
        """Whether it recomputes whole stages regardless of memory."""
        return BUILDERS[self.schedule].recomputes

    def policy(self, policy: str | Shares) -> str | Shares:
        """The recomputation policy under this order: one that recomputes by itself turns "auto" into "full"."""
        return "full" if policy == "auto" and self.recomputes else policy


ORDERS = tuple(Order(builder.name, chunks) for builder in BUILDERS.values() for chunks in builder.tried)
"""The orders that are tried where none is set."""


@dataclass(frozen=True)
class Freedom:
    """What the search may choose from."""

    orders: tuple[Order, ...]  # schedules with their chunks
    micro_batches: int | None  # their number; None for any power of two or divisor of the rows between
    num_ranks: int | None  # of each replica; None for any
    near: bool | None  # whether replicas stay on one host where possible (True), or identical devices are dealt out (False); None for both
    alike: bool  # whether replicas must be identical, because samples depend on one another: then they are joined
    fewer: bool  # whether replicas of one device type may leave out others, as the cheapest plan does
    policies: tuple[str | Shares, ...]  # of recomputation, each tried with every strategy
    config: Config  # the settings that plans are made with
    using: Device | None = None  # a device type that every plan must use; None for any


def pin_of(config: Config) -> str | None:
    """The setting that decides the whole plan, so that there is no search; None where nothing does."""
    pins = {
        "planning.search off": config.planning.search == "off",
        "the plan that is written down": any(block.stages for block in config.replicas),
    }
    return next((name for name, is_set in pins.items() if is_set), None)


def _counts(block: ReplicaBlock) -> bool:
    """Whether a block sets the number of micro-batches."""
    return block.micro_batch_rows is not None or "num_micro_batch" in dict(block.pipeline)


def _orders(block: ReplicaBlock) -> bool:
    """Whether a block sets the schedule."""
    return not dict(block.pipeline).keys().isdisjoint(("schedule", "num_chunks", "group_size"))


def freedom_of(config: Config, *, mixes_samples: bool) -> Freedom:
    """What a configuration leaves open: every key that was not set.

    `mixes_samples`: samples depend on one another, so that more than one micro-batch would change the result.
    """
    pipeline = config.pipeline
    is_order_set = not config.explicit.isdisjoint(("pipeline.schedule", "pipeline.num_chunks", "pipeline.group_size"))
    is_order_set |= bool(config.replicas) and all(map(_orders, config.replicas))
    is_counted = "pipeline.num_micro_batch" in config.explicit or (bool(config.replicas) and all(map(_counts, config.replicas)))
    num_micro_batch = pipeline.num_micro_batch if is_counted else 1 if mixes_samples else None
    is_policy_set = "recompute.policy" in config.explicit
    if not is_policy_set:
        config = config.with_values({"recompute.policy": "auto"})
    is_for_memory = config.planning.objective == "memory" and not is_policy_set
    return Freedom(
        orders=(Order(pipeline.schedule, pipeline.num_chunks),) if is_order_set else ORDERS,
        micro_batches=num_micro_batch,
        num_ranks=pipeline.num_stages,
        near=config.cluster.device_place_prefer_intra_node if "cluster.device_place_prefer_intra_node" in config.explicit else None,
        alike=mixes_samples,
        fewer=config.planning.objective == "cost",
        policies=FOR_MEMORY if is_for_memory else (config.recompute.policy,),
        config=config,
    )
