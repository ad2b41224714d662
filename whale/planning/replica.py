"""One model replica on its devices: its time and memory for any number of rows, and the rows of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whale.cost import Line, pipeline_seconds
from whale.cost.op_table import Floats
from whale.ir.plan import Edge, Replica, Stage, VirtualDevice
from whale.planning.balance import Curve, MemoryShortage, combine, device_curve, divide_units
from whale.planning.placement import Placed
from whale.planning.pricing import DeviceCost, Pricing
from whale.planning.scheduling import Pipeline
from whale.planning.scope_tree import Copies
from whale.planning.stages import Assignment, Recompute

Curves = Mapping[int, Sequence[Curve]]
"""Per rank, the curve of each of its devices over the rows of a micro-batch."""


@dataclass(frozen=True)
class ReplicaModel:
    """A replica, priced.

    Attributes:
        placed: the devices of each rank.
        assignment: the ops of each stage.
        costs: per stage, per device.
        recomputes: per stage, what it computes again.
        ranks: curves over the rows of a micro-batch.
        curve: of the whole replica, over its rows of a step.
    """

    placed: Placed
    assignment: Assignment
    costs: tuple[tuple[DeviceCost, ...], ...]
    recomputes: tuple[Recompute, ...]
    ranks: Curves
    curve: Curve


def model_replica(
    pricing: Pricing,
    pipeline: Pipeline,
    placed: Placed,
    assignment: Assignment,
    recomputes: tuple[Recompute, ...],
    num_rows: int,
    rows_about: float,
) -> ReplicaModel:
    """Prices a replica.

    Args:
        recomputes: per stage, what it computes again.
        num_rows: rows of the global batch, the most that it can be given.
        rows_about: rows of a micro-batch that it is expected to get; prices are lines about it.
    """
    devices = [placed[rank] for rank in pipeline.stage_rank]
    costs = tuple(
        pricing.stage(assignment, stage, devices, max(1.0, rows_about / len(devices[stage])), recomputes[stage])
        for stage in range(pipeline.num_stages)
    )
    most = -(-num_rows // pipeline.num_micro_batch)
    ranks = {rank: _device_curves(pipeline, placed[rank], costs, rank, most) for rank in range(pipeline.num_ranks)}
    return ReplicaModel(placed, assignment, costs, recomputes, ranks, _replica_curve(pipeline, ranks, num_rows, most))


def _device_curves(
    pipeline: Pipeline, names: Sequence[str], costs: Sequence[Sequence[DeviceCost]], rank: int, most: int
) -> tuple[Curve, ...]:
    """Curves of the devices of a rank; equal devices share one."""
    found: dict[tuple[DeviceCost, ...], Curve] = {}
    curves = []
    for position, name in enumerate(names):
        stages = pipeline.stages_of(rank)
        own = tuple(costs[stage][position] for stage in stages)
        if own not in found:
            seconds = Line.sum(cost.seconds for cost in own)
            kept = Line.sum(cost.memory(pipeline.in_flight[stage]) for stage, cost in zip(stages, own, strict=True))
            working = Line(max(cost.part.working.fixed for cost in own), max(cost.part.working.per_row for cost in own))
            found[own] = device_curve(most, seconds, kept + working, own[0].capacity, f"{name} (stage {stages[0]})")
        curves.append(found[own])
    return tuple(curves)


def _replica_curve(pipeline: Pipeline, ranks: Curves, num_rows: int, most: int) -> Curve:
    """Time and memory by the rows of a step, cut in micro-batches that differ by at most one row."""
    m = pipeline.num_micro_batch
    together = [combine(most, curves) for curves in ranks.values()]
    rows = np.arange(num_rows + 1)
    mean, largest = rows / m, -(-rows // m)
    seconds: list[Floats] = [np.interp(mean, np.arange(most + 1), curve.seconds) for curve in together]
    excess = np.max([curve.excess[largest] for curve in together], axis=0)
    worst = max(together, key=lambda curve: float(curve.excess[-1]))
    return Curve(
        pipeline_seconds(pipeline.schedule, seconds, m, pipeline.num_chunks),
        excess,
        m * max(curve.minimum for curve in together),
        worst.place,
    )


def device_rows(pipeline: Pipeline, ranks: Curves, num_rows: int) -> dict[int, tuple[int, ...]]:
    """Per rank, the rows of a micro-batch that each device takes.

    Copies of a nested pipeline first divide the rows among them, so that each keeps its rows from stage to stage;
    where that does not fit in memory, every stage divides its rows by itself.
    """
    try:
        return _divide(pipeline.copies, ranks, num_rows)
    except MemoryShortage:
        return {rank: divide_units(num_rows, curves) for rank, curves in ranks.items()}


def _divide(node: Copies, ranks: Curves, num_rows: int) -> dict[int, tuple[int, ...]]:
    copies = [_ranks_of_copy(node, ranks, number) for number in range(node.count)]
    shares = divide_units(num_rows, [_copy_curve(node, own, num_rows) for own in copies]) if node.count > 1 else (num_rows,)
    sizes: dict[int, tuple[int, ...]] = dict.fromkeys(node.stages, ())
    for share, own in zip(shares, copies, strict=True):
        for member in node.members:
            inner = {member: divide_units(share, own[member])} if isinstance(member, int) else _divide(member, own, share)
            for rank, rows in inner.items():
                sizes[rank] = (*sizes[rank], *rows)
    return sizes


def _ranks_of_copy(node: Copies, ranks: Curves, number: int) -> dict[int, Sequence[Curve]]:
    found: dict[int, Sequence[Curve]] = {}
    for rank in node.stages:
        width = len(ranks[rank]) // node.count
        found[rank] = ranks[rank][number * width : (number + 1) * width]
    return found


def _copy_curve(node: Copies, own: Curves, num_rows: int) -> Curve:
    """The curve of one copy: its slowest stage."""
    curves = []
    for member in node.members:
        if isinstance(member, int):
            curves.append(combine(num_rows, own[member]))
        else:
            copies = [_copy_curve(member, _ranks_of_copy(member, own, number), num_rows) for number in range(member.count)]
            curves.append(combine(num_rows, copies))
    length = num_rows + 1
    worst = max(curves, key=lambda curve: float(curve.excess[length - 1]))
    return Curve(
        np.max([curve.seconds[:length] for curve in curves], axis=0),
        np.max([curve.excess[:length] for curve in curves], axis=0),
        max(curve.minimum for curve in curves),
        worst.place,
    )


def make_replica(
    pricing: Pricing, pipeline: Pipeline, model: ReplicaModel, names: Sequence[Sequence[str]], index: int, num_rows: int
) -> Replica:
    """The replica as the plan states it.

    Args:
        names: per stage, its TaskGraphs.
        num_rows: its rows of a step.
    """
    largest = -(-num_rows // pipeline.num_micro_batch)
    rows = device_rows(pipeline, model.ranks, largest)
    stages = []
    for stage, rank in enumerate(pipeline.stage_rank):
        part = model.assignment.parts[stage]
        estimates = tuple(
            cost.estimate(share, pipeline.in_flight[stage]) for cost, share in zip(model.costs[stage], rows[rank], strict=True)
        )
        recompute = tuple((segment[0], segment[-1]) for segment in model.recomputes[stage].segments)
        stages.append(
            Stage(
                stage,
                tuple(names[stage]),
                part.ops,
                VirtualDevice(model.placed[rank]),
                rows[rank],
                part.parameters,
                estimates,
                recompute=recompute,
            )
        )
    edges = tuple(
        Edge(source, target, tensors, round(pricing.payload(tensors)[0].at(largest)))
        for (source, target), tensors in model.assignment.edges.items()
    )
    return Replica(index, num_rows, tuple(stages), edges)
