"""The end of a step: gradients of every owner set are reduced, then the optimizer runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale.estimate import Line, all_reduce_seconds, exposed_sync
from whale.estimate.costs.communication import ring_volume
from whale.estimate.prices.budget import Budget
from whale.estimate.prices.prices import Prices
from whale.ir.plan import members_of
from whale.planning.replicas.replica import ReplicaModel
from whale.sharding.keepers import connected
from whale.sharding.parameters import Holders, ParameterShardings


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """Seconds after the last backward pass, on the slowest device."""

    sync: float  # gradient reduction, fully exposed
    optimizer: float  # the optimizer's step
    exposed: float  # the part of `sync` that backward passes cannot hide, without handling


def handled_sums(prices: Prices, replicas: Sequence[ReplicaModel]) -> tuple[float, ...]:
    """Per replica, the seconds that handling of gradient sums takes on its busiest device."""
    handling = {device.name: device.reached_handling for device in prices.cluster.devices if device.handling}
    if not handling or not prices.training:
        return (0.0,) * len(replicas)
    taken: dict[str, float] = {}
    for owners, num_bytes in _owner_sets(prices, replicas).items():
        size = min(num_bytes, prices.costs.bucket_bytes)
        for device in handling.keys() & owners if size else ():
            one = ring_volume(len(owners), Line(size * prices.sent_share), 2).seconds(handling[device])
            taken[device] = taken.get(device, 0.0) + one * num_bytes / size
    return tuple(max(taken.get(device, 0.0) for rank in replica.placed for device in rank) for replica in replicas)


def end_of_step(prices: Prices, budget: Budget, replicas: Sequence[ReplicaModel], rows: Sequence[int], handled: float = 0.0) -> EndOfStep:
    """Prices the end of a step. Heterogeneous replicas synchronise after all else, fully exposed.

    Args:
        rows: of a step, per replica.
        handled: seconds of handling that already count as work.
    """
    if not prices.training:
        return EndOfStep(0.0, 0.0, 0.0)
    reduced: dict[str, float] = {}
    weights: dict[str, int] = {}
    for owners, num_bytes in _owner_sets(prices, replicas).items():
        seconds = all_reduce_seconds(prices.cluster, owners, round(num_bytes * prices.sent_share))
        for device in owners:
            reduced[device] = reduced.get(device, 0.0) + seconds
            weights[device] = weights.get(device, 0) + num_bytes
    optimizer = max((prices.update_seconds(prices.cluster.by_name[device], held, budget) for device, held in weights.items()), default=0.0)
    sync = max(reduced.values(), default=0.0)
    exposed, pipeline = sync, replicas[0].pipeline
    if all(replica.pipeline is pipeline for replica in replicas):
        backward = shortest_backward(replicas, rows)
        exposed = exposed_sync(pipeline.schedule, sync, backward, pipeline.num_micro_batch, pipeline.num_chunks, pipeline.group_size)
    return EndOfStep(sync, optimizer, max(0.0, exposed - handled))


def shortest_backward(replicas: Sequence[ReplicaModel], rows: Sequence[int]) -> float:
    """Seconds of the backward pass of one micro-batch on the rank where it is shortest and so hides least."""
    found = []
    unlike = {(id(replica.costs), id(replica.pipeline), share): (replica, share) for replica, share in zip(replicas, rows, strict=True)}
    for replica, share in unlike.values():
        pipeline = replica.pipeline
        taken = share / pipeline.num_micro_batch
        for rank in range(pipeline.num_ranks):
            stages = pipeline.stages_of(rank)
            found.append(sum(replica.costs[stage][0].backward.device.at(taken / pipeline.num_groups(stage)) for stage in stages))
    return min(found)


def _owner_sets(prices: Prices, replicas: Sequence[ReplicaModel]) -> dict[tuple[str, ...], int]:
    """Trainable bytes by the devices whose gradients are summed, in the cluster's order.

    Of a split group with equal gradients one device counts.
    """
    held = ((own.name, prices.held(own.name).gradient) for own in prices.graph.parameters)
    num_bytes = {name: gradient for name, gradient in held if gradient}
    shardings = _shardings(prices, replicas)
    sets: dict[tuple[str, ...], int] = {}
    for sharding, names in shardings.alike(name for name in shardings.parameters if name in num_bytes):
        total = sum(num_bytes[name] for name in names)
        for piece in (piece for _, pieces in shardings.summed_pieces(names[0]) for piece in pieces):
            owners = tuple(shardings.names[device] for device in sorted(piece.contributors))
            sets[owners] = sets.get(owners, 0) + round(total * piece.region.volume / sharding.hull.volume)
    return sets


def _shardings(prices: Prices, replicas: Sequence[ReplicaModel]) -> ParameterShardings:
    """Where the parameters of these replicas lie; devices are numbered as in the cluster."""
    number = {device.name: index for index, device in enumerate(prices.cluster.devices)}
    holders = Holders()
    for index, replica in enumerate(replicas):
        for stage, part in enumerate(replica.assignment.parts):
            sharding, pipeline = replica.shardings[stage], replica.pipeline
            devices = tuple(number[device] for device in replica.placed[pipeline.stage_rank[stage]])
            holders.add((index, stage), devices, part.parameters, pipeline.width(stage), sharding.shards if sharding else ())
    axes = prices.axes if any(holder.pattern.shards for holder in holders.gathered) else None
    return ParameterShardings(tuple(holders.gathered), axes, tuple(number), sync_groups=_apart(prices, replicas))


def _apart(prices: Prices, replicas: Sequence[ReplicaModel]) -> tuple[tuple[int, ...], ...]:
    """Devices, numbered as in the cluster, that step together where hosts step on their own; else empty."""
    if prices.costs.rounds is None:
        return ()
    host_of = {device.name: device.host for device in prices.cluster.devices}
    joined = ({host_of[device] for rank in replica.placed for device in rank} for replica in replicas)
    return tuple(map(tuple, members_of(connected([*host_of.values()], joined))))
