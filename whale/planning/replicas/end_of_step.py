"""What ends a step: the gradients of every owner set are reduced, then the optimizer runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from whale.estimate import exposed_sync, optimizer_seconds, ring_all_reduce_seconds
from whale.estimate.prices import Prices
from whale.ir.division import intervals
from whale.planning.replicas.replica import ReplicaModel


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


def end_of_step(prices: Prices, replicas: Sequence[ReplicaModel], rows: Sequence[int]) -> EndOfStep:
    """Prices the end of a step. Unlike replicas synchronise when all else is done, so that nothing of it is hidden.

    Args:
        rows: of a step, per replica.
    """
    if not prices.training:
        return EndOfStep(0.0, 0.0, 0, 0.0)
    reduced: dict[str, float] = {}
    moved: dict[str, int] = {}
    weights: dict[str, int] = {}
    for owners, num_bytes in _owner_sets(prices, replicas).items():
        seconds = ring_all_reduce_seconds(prices.cluster, owners, num_bytes)
        for device in owners:
            reduced[device] = reduced.get(device, 0.0) + seconds
            moved[device] = moved.get(device, 0) + (num_bytes if len(owners) > 1 else 0)
            weights[device] = weights.get(device, 0) + num_bytes
    slowest = max(reduced, key=lambda device: reduced[device], default=None)
    optimizer = max(
        (optimizer_seconds(prices.cluster.by_name[device], held, prices.costs.optimizer_states) for device, held in weights.items()),
        default=0.0,
    )
    sync = reduced[slowest] if slowest else 0.0
    exposed, pipeline = sync, replicas[0].pipeline
    if all(replica.pipeline is pipeline for replica in replicas):
        backward = shortest_backward(replicas, rows)
        exposed = exposed_sync(pipeline.schedule, sync, backward, pipeline.num_micro_batch, pipeline.num_chunks, pipeline.group_size)
    return EndOfStep(sync, optimizer, moved[slowest] if slowest else 0, exposed)


def shortest_backward(replicas: Sequence[ReplicaModel], rows: Sequence[int]) -> float:
    """Seconds of the backward pass of one micro-batch on the rank where it is shortest, so where it hides least."""
    found = []
    for replica, share in zip(replicas, rows, strict=True):
        pipeline = replica.pipeline
        taken = share / pipeline.num_micro_batch
        for rank in range(pipeline.num_ranks):
            stages = pipeline.stages_of(rank)
            found.append(sum(replica.costs[stage][0].backward.at(taken / pipeline.num_groups(stage)) for stage in stages))
    return min(found)


def _owner_sets(prices: Prices, replicas: Sequence[ReplicaModel]) -> dict[tuple[str, ...], int]:
    """Trainable bytes by the devices that hold them, in the cluster's order."""
    order = {device.name: index for index, device in enumerate(prices.cluster.devices)}
    shard = _cut_parameters(prices, replicas)
    by_place: dict[tuple[Place, ...], int] = {}
    for name, places in _holders(prices, replicas).items():
        if name not in shard:
            key_of_set = tuple(dict.fromkeys(places))
            by_place[key_of_set] = by_place.get(key_of_set, 0) + prices.graph.parameter_by_name[name].spec.num_bytes
    sets: dict[tuple[str, ...], int] = {}
    for places_of_set, num_bytes in by_place.items():
        wanted = set(places_of_set)
        devices = {
            name
            for replica in replicas
            for key, rank, width in wanted
            if key == _form(replica)
            for name in replica.placed[rank][::width]  # a split group has equal gradients of what it holds whole
        }
        owners = tuple(sorted(devices, key=order.__getitem__))
        sets[owners] = sets.get(owners, 0) + num_bytes
    for name in sorted(shard):
        for holders, num_bytes in _pieces(prices, replicas, name, shard[name]):
            owners = tuple(sorted(holders, key=order.__getitem__))
            sets[owners] = sets.get(owners, 0) + num_bytes
    return sets


Form = tuple[int, int]
"""Of a replica: equal where assignment and pipeline are the same."""
Place = tuple[Form, int, int]
"""Replicas of one form, a rank of theirs, and the width of its split groups."""


def _form(replica: ReplicaModel) -> Form:
    return id(replica.assignment), id(replica.pipeline)


def _holders(prices: Prices, replicas: Sequence[ReplicaModel]) -> dict[str, list[Place]]:
    """Per trainable parameter, the places that hold it."""
    found: dict[str, list[Place]] = {}
    for key, replica in {_form(replica): replica for replica in replicas}.items():
        pipeline = replica.pipeline
        for stage, part in enumerate(replica.assignment.parts):
            for name in part.parameters:
                parameter = prices.graph.parameter_by_name[name]
                if parameter.kind == "parameter" and parameter.trainable:
                    found.setdefault(name, []).append((key, pipeline.stage_rank[stage], pipeline.width(stage)))
    return found


def _cut_parameters(prices: Prices, replicas: Sequence[ReplicaModel]) -> dict[str, tuple[str, ...]]:
    """Per trainable parameter that some device holds a part of, the axes that are cut of it."""
    axes = {shard.axis: None for replica in replicas for cutting in replica.cuttings if cutting for shard in cutting.shards}
    found: dict[str, tuple[str, ...]] = {}
    for axis in axes:
        for name in dict.fromkeys(holder.rpartition(":")[0] for holder in prices.axes.held_by[axis]):
            parameter = prices.graph.parameter_by_name[name]
            if parameter.kind == "parameter" and parameter.trainable:
                found[name] = (*found.get(name, ()), axis)
    return found


def _pieces(prices: Prices, replicas: Sequence[ReplicaModel], name: str, axes: Sequence[str]) -> Iterator[tuple[frozenset[str], int]]:
    """The pieces into which all bounds together cut a parameter: who holds each, and its bytes."""
    held = dict(_regions(replicas, name, axes))
    size = {axis: prices.axes.by_name[axis].size for axis in axes}
    bounds = {axis: sorted({0, size[axis], *(end for region in held.values() for end in region.get(axis, ()))}) for axis in axes}
    num_bytes = prices.graph.parameter_by_name[name].spec.num_bytes
    for box in product(*(pairwise(bounds[axis]) for axis in axes)):
        piece = dict(zip(axes, box, strict=True))
        owners = frozenset(
            device
            for device, region in held.items()
            if all(region[axis][0] <= start and stop <= region[axis][1] for axis, (start, stop) in piece.items() if axis in region)
        )
        yield owners, round(num_bytes * prod((stop - start) / size[axis] for axis, (start, stop) in piece.items()))


def _regions(replicas: Sequence[ReplicaModel], name: str, axes: Sequence[str]) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Per device that holds a parameter, its interval of each axis that it does not hold whole."""
    for replica in replicas:
        pipeline = replica.pipeline
        for stage, part in enumerate(replica.assignment.parts):
            if name not in part.parameters:
                continue
            cutting, width = replica.cuttings[stage], pipeline.width(stage)
            own = {shard.axis: intervals(shard.sizes) for shard in (cutting.shards if cutting else ()) if shard.axis in axes}
            for index, device in enumerate(replica.placed[pipeline.stage_rank[stage]]):
                if own or index % width == 0:
                    yield device, {axis: parts[index % width] for axis, parts in own.items()}
