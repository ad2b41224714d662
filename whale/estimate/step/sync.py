"""Gradient synchronisation as the runtime does it: the buckets, their owners, and when in the last backward pass each is ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whale.estimate.prices.prices import Prices
from whale.ir.plan import Plan, Stage
from whale.schedules import alike_schedules, is_at_one_place
from whale.sharding.parameters import parameter_shardings

Holder = tuple[int, int]
"""Replica and stage."""

_Key = tuple[tuple[Holder, ...], tuple[str, ...], str]
"""Who makes gradients, who owns them, and their dtype."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together.

    Attributes:
        names: of their parameters.
        num_bytes: of the gradients.
        owners: the devices that sum them, in the order of the plan's ranks.
        stages: who makes them: (replica, stage).
        is_at_one_place: whether they end them at one place of equal schedules; else it starts when all else is done.
    """

    names: tuple[str, ...]
    num_bytes: float
    owners: tuple[str, ...]
    stages: tuple[Holder, ...]
    is_at_one_place: bool


def buckets(plan: Plan, prices: Prices) -> tuple[Bucket, ...]:
    """All buckets, in the order in which they start."""
    graph, costs = prices.graph, prices.costs
    if not prices.training:
        return ()
    is_sharded = any(stage.shards for replica in plan.replicas for stage in replica.stages)
    found = parameter_shardings(plan, graph, prices.axes if is_sharded else None)
    last, known = graph.last_reads, set(found.parameters)
    trained = [p.name for p in graph.parameters if p.kind == "parameter" and p.trainable and p.name in known and p.name in last]
    growing: dict[_Key, tuple[list[str], float]] = {}
    closed, alike = list[Bucket](), alike_schedules(plan)
    for name in sorted(trained, key=lambda each: (-last[each], each)):
        spec = graph.parameter_by_name[name].spec
        gradient = found.gradient(name)
        for piece in gradient.pieces:
            if piece.is_complete:
                continue
            key = found.places(name), tuple(plan.devices[owner] for owner in piece.owners), spec.dtype
            names, num_bytes = growing.get(key, ([], 0.0))
            growing[key] = [*names, name], num_bytes + spec.num_bytes * piece.region.volume / gradient.hull.volume
            if growing[key][1] >= costs.bucket_bytes:
                closed.append(_close(key, growing.pop(key), alike))
    closed += [_close(key, grown, alike) for key, grown in growing.items()]

    def order(bucket: Bucket) -> tuple[object, ...]:
        return not bucket.is_at_one_place, -max(stage for _, stage in bucket.stages), -last[bucket.names[0]], bucket.names[0]

    return tuple(sorted(closed, key=order))


def _close(key: _Key, found: tuple[list[str], float], alike: Sequence[int]) -> Bucket:
    return Bucket(tuple(dict.fromkeys(found[0])), found[1], key[1], key[0], is_at_one_place(alike, key[0]))


def ready_share(prices: Prices, stage: Stage, device: str, names: Sequence[str], first: Mapping[str, int]) -> float:
    """The share of a stage's backward pass after which the gradients of some parameters are final.

    A gradient is final once the backward pass has come to the first op that reads the parameter.

    Args:
        first: `first_uses` of the stage.
    """
    index = np.array([prices.table.position[name] for name in stage.ops], dtype=np.int64)
    seconds = prices.seconds(prices.cluster.by_name[device], 1.0)
    backward = (seconds.backward_fixed + seconds.backward_per_row)[index]
    total = float(backward.sum())
    start = min((first[name] for name in names if name in first), default=0)
    return float(backward[start:].sum()) / total if total > 0 else 1.0


def first_uses(prices: Prices, stage: Stage) -> dict[str, int]:
    """Per parameter of a stage, the position among its ops of the first that reads it."""
    graph, found = prices.graph, dict[str, int]()
    for position, name in enumerate(stage.ops):
        for read in graph.by_name[name].inputs:
            op = graph.by_name[read]
            if op.kind == "parameter":
                found.setdefault(graph.parameter_by_name[op.target].name, position)
    return found
