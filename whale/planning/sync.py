"""What ends a step: the gradients of every owner set are reduced, then the optimizer runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale.cost import exposed_sync, optimizer_seconds, ring_all_reduce_seconds
from whale.planning.pricing import Pricing
from whale.planning.replica import ReplicaModel
from whale.planning.scheduling import Pipeline


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """Seconds after the last backward pass, on the slowest device.

    Attributes:
        sync: gradient reduction, as if none of it were hidden.
        optimizer: the optimizer's step.
        num_bytes: gradient bytes of the device that reduces longest.
        exposed: what the schedule cannot hide of `sync` behind backward passes.
    """

    sync: float
    optimizer: float
    num_bytes: int
    exposed: float


def end_of_step(pricing: Pricing, pipeline: Pipeline, replicas: Sequence[ReplicaModel], rows: Sequence[int]) -> EndOfStep:
    """Prices the end of a step.

    Args:
        rows: of a step, per replica.
    """
    if not pricing.training:
        return EndOfStep(0.0, 0.0, 0, 0.0)
    reduced: dict[str, float] = {}
    moved: dict[str, int] = {}
    weights: dict[str, int] = {}
    for owners, num_bytes in _owner_sets(pricing, pipeline, replicas).items():
        seconds = ring_all_reduce_seconds(pricing.cluster, owners, num_bytes)
        for device in owners:
            reduced[device] = reduced.get(device, 0.0) + seconds
            moved[device] = moved.get(device, 0) + (num_bytes if len(owners) > 1 else 0)
            weights[device] = weights.get(device, 0) + num_bytes
    slowest = max(reduced, key=lambda device: reduced[device], default=None)
    optimizer = max(
        (optimizer_seconds(pricing.cluster.by_name[device], held, pricing.optimizer_states) for device, held in weights.items()),
        default=0.0,
    )
    sync = reduced[slowest] if slowest else 0.0
    backward = shortest_backward(pipeline, replicas, rows)
    exposed = exposed_sync(pipeline.schedule, sync, backward, pipeline.num_micro_batch, pipeline.num_chunks, pipeline.group_size)
    return EndOfStep(sync, optimizer, moved[slowest] if slowest else 0, exposed)


def shortest_backward(pipeline: Pipeline, replicas: Sequence[ReplicaModel], rows: Sequence[int]) -> float:
    """Seconds of the backward pass of one micro-batch on the rank where it is shortest, so where it hides least."""
    found = []
    for replica, share in zip(replicas, rows, strict=True):
        taken = share / pipeline.num_micro_batch
        for rank in range(pipeline.num_ranks):
            stages = pipeline.stages_of(rank)
            found.append(sum(replica.costs[stage][0].backward.at(taken / pipeline.num_groups(stage)) for stage in stages))
    return min(found)


def _owner_sets(pricing: Pricing, pipeline: Pipeline, replicas: Sequence[ReplicaModel]) -> dict[tuple[str, ...], int]:
    """Trainable bytes by the devices that hold them, in the cluster's order."""
    order = {device.name: index for index, device in enumerate(pricing.cluster.devices)}
    assignments = {id(replica.assignment): replica.assignment for replica in replicas}
    holders: dict[str, list[tuple[int, int]]] = {}
    for key, assignment in assignments.items():
        for stage, part in enumerate(assignment.parts):
            for name in part.parameters:
                holders.setdefault(name, []).append((key, pipeline.stage_rank[stage]))
    by_place: dict[tuple[tuple[int, int], ...], int] = {}
    for name, places in holders.items():
        parameter = pricing.graph.parameter_by_name[name]
        if parameter.kind == "parameter" and parameter.trainable:
            key_of_set = tuple(dict.fromkeys(places))
            by_place[key_of_set] = by_place.get(key_of_set, 0) + parameter.spec.num_bytes
    sets: dict[tuple[str, ...], int] = {}
    for places_of_set, num_bytes in by_place.items():
        wanted = set(places_of_set)
        devices = {
            name
            for replica in replicas
            for rank, names in enumerate(replica.placed)
            if (id(replica.assignment), rank) in wanted
            for name in names
        }
        owners = tuple(sorted(devices, key=order.__getitem__))
        sets[owners] = sets.get(owners, 0) + num_bytes
    return sets
