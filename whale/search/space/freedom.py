"""What the user left to the search, and what stays as it was set."""

from __future__ import annotations

from dataclasses import dataclass

from whale.config import Config, ReplicaBlock
from whale.config.keys import Shares
from whale.ir.cluster import Device
from whale.search.arrangement import Order

ORDERS = (Order("1f1b"), Order("eager_1f1b"), Order("interleaved", 2), Order("zb_h1"), Order("zb_h2"))
"""The orders that are tried where none is set."""

FOR_MEMORY = ("none", "blocks", "full")
"""Where least memory is looked for, what is computed again is not left to what fits: each of these is tried where none is set."""


@dataclass(frozen=True)
class Freedom:
    """What the search may choose from.

    Attributes:
        orders: schedules with their chunks.
        micro_batches: their number; None for any power of two or divisor of the rows between.
        num_ranks: of each replica; None for any.
        near: whether replicas stay on one host where they can (True), or like devices are dealt out (False); None for both.
        alike: whether replicas must be alike, because samples depend on one another: then they are joined.
        fewer: whether on many devices replicas of one kind may leave others of it out, as the cheapest plan does.
        policies: of recomputation, each tried with every arrangement.
        config: the settings with which plans are made.
        splits: whether ranks may be split groups.
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
    splits: bool = True
    using: Device | None = None

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """Whether all may be computed again in the backward pass: what sketches try, in this order."""
        found = {policy in ("auto", "blocks", "full") for policy in self.policies}
        return (False, True) if "auto" in self.policies else tuple(sorted(found))


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
