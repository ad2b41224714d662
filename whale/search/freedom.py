"""What the user left to the search, and what stays as it was set."""

from __future__ import annotations

from dataclasses import dataclass

from whale.config import Config, ReplicaBlock
from whale.config.keys import Shares
from whale.ir.cluster import Device
from whale.schedules import BUILDERS, ScheduleShape

FOR_MEMORY = ("none", "blocks", "full")
"""Where least memory is looked for, what is computed again is not left to what fits: each of these is tried where none is set."""


RECOMPUTING = ("recompute_early", "last_no_recompute", "shifted_critical_path")


@dataclass(frozen=True, slots=True)
class Order:
    """In which order the stages of a replica compute.

    Attributes:
        schedule: name of the schedule kind.
        num_chunks: stages per rank.
    """

    schedule: str
    num_chunks: int = 1

    def alive(self, num_ranks: int, num_micro_batch: int) -> float:
        """Micro-batches that a rank has in flight, in the mean of the first and the last."""
        builder, shape = BUILDERS[self.schedule], ScheduleShape(num_ranks, num_micro_batch, self.num_chunks, num_ranks)
        return (builder.peak(shape, 0) + builder.peak(shape, num_ranks - 1)) / 2 / self.num_chunks

    @property
    def recomputes(self) -> bool:
        """Whether it computes whole stages again, whatever the memory."""
        return self.schedule in RECOMPUTING

    def policy(self, policy: str | Shares) -> str | Shares:
        """What is computed again where a policy is set: in an order that does so by itself, automatically is in full."""
        return "full" if policy == "auto" and self.recomputes else policy


ORDERS = (
    Order("1f1b"),
    Order("eager_1f1b"),
    Order("interleaved", 2),
    Order("interleaved", 4),
    Order("zb_h1"),
    Order("zb_h2"),
    Order("zb_v", 2),
    Order("aiao", 2),
    Order("recompute_early"),
    Order("last_no_recompute"),
    Order("shifted_critical_path"),
)
"""The orders that are tried where none is set; the last three compute whole stages again."""


@dataclass(frozen=True)
class Freedom:
    """What the search may choose from.

    Attributes:
        orders: schedules with their chunks.
        micro_batches: their number; None for any power of two or divisor of the rows between.
        num_ranks: of each replica; None for any.
        near: whether replicas stay on one host where they can (True), or identical devices are dealt out (False); None for both.
        alike: whether replicas must be identical, because samples depend on one another: then they are joined.
        fewer: whether on many devices replicas of one kind may leave others of it out, as the cheapest plan does.
        policies: of recomputation, each tried with every strategy.
        config: the settings with which plans are made.
        using: a kind of device that is among those of every plan; None for any.
    """

    orders: tuple[Order, ...]
    micro_batches: int | None
    num_ranks: int | None
    near: bool | None
    alike: bool
    fewer: bool
    policies: tuple[str | Shares, ...]
    config: Config
    using: Device | None = None


def pin_of(config: Config) -> str | None:
    """What decides the whole plan, so that nothing is searched for; None where nothing does."""
    pins = {
        "planning.search off": config.planning.search == "off",
        "the plan that is written down": any(block.stages for block in config.replicas),
    }
    return next((name for name, is_set in pins.items() if is_set), None)


def _counts(block: ReplicaBlock) -> bool:
    """Whether a block says how many micro-batches its replica has."""
    return block.micro_batch_rows is not None or "num_micro_batch" in dict(block.pipeline)


def _orders(block: ReplicaBlock) -> bool:
    """Whether a block says in which order its stages compute."""
    return not dict(block.pipeline).keys().isdisjoint(("schedule", "num_chunks", "group_size"))


def freedom_of(config: Config, *, mixes_samples: bool) -> Freedom:
    """What a configuration leaves open: every key that was not set.

    Args:
        mixes_samples: whether samples depend on one another, so that more than one micro-batch would change what is computed.
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
