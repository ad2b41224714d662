"""What the user left to the search, and what stays as it was set."""

from __future__ import annotations

from dataclasses import dataclass

from whale.config import Config
from whale.ir.graph import ModelGraph
from whale.search.arrangement import Order

ORDERS = (Order("1f1b"), Order("interleaved", 2))
"""The orders that are tried where none is set."""


@dataclass(frozen=True)
class Freedom:
    """What the search may choose from.

    Attributes:
        orders: schedules with their chunks.
        micro_batches: their number; None for any power of two.
        num_ranks: of each replica; None for any.
        near: whether replicas stay on one host where they can (True), or like devices are dealt out (False); None for both.
        alike: whether replicas must be alike, because samples depend on one another: then they are joined.
        config: the settings with which plans are made.
    """

    orders: tuple[Order, ...]
    micro_batches: int | None
    num_ranks: int | None
    near: bool | None
    alike: bool
    config: Config


def is_free(graph: ModelGraph, config: Config) -> bool:
    """Whether nothing decides how the model is divided: no scope, no replicas, no number of stages; and a search is not forbidden."""
    decided = bool(config.replicas) or config.pipeline.num_stages is not None or any(op.scope for op in graph.ops)
    return config.planning.search == "auto" and not decided


def freedom_of(config: Config, *, mixes_samples: bool) -> Freedom:
    """What a configuration leaves open: every key that was not set.

    Args:
        mixes_samples: whether samples depend on one another, so that more than one micro-batch would change what is computed.
    """
    pipeline = config.pipeline
    is_order_set = not config.explicit.isdisjoint(("pipeline.schedule", "pipeline.num_chunks", "pipeline.group_size"))
    num_micro_batch = pipeline.num_micro_batch if "pipeline.num_micro_batch" in config.explicit else 1 if mixes_samples else None
    if "recompute.policy" not in config.explicit:
        config = config.with_values({"recompute.policy": "auto"})
    return Freedom(
        orders=(Order(pipeline.schedule, pipeline.num_chunks),) if is_order_set else ORDERS,
        micro_batches=num_micro_batch,
        num_ranks=pipeline.num_stages,
        near=config.cluster.device_place_prefer_intra_node if "cluster.device_place_prefer_intra_node" in config.explicit else None,
        alike=mixes_samples,
        config=config,
    )
