"""One model replica on its devices: its time and memory for any number of rows, and the rows of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.estimate import Line, pipeline_seconds
from whale.estimate.costs.line import Floats
from whale.estimate.prices.part import Part, Recompute
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Edge, Replica, Shard, Stage, VirtualDevice, program_of
from whale.planning.annotations.scope_tree import Copies
from whale.planning.pipeline.balance import Curve, MemoryShortage, combine, divide_units
from whale.planning.pipeline.recompute import rank_memory
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.pricing import DeviceCost
from whale.planning.shard.overlapping import Overlapping
from whale.planning.shard.sharding import StageSharding
from whale.planning.shard.stage_price import StagePricing
from whale.planning.shard.write import with_unread
from whale.planning.strategy import Placed
from whale.planning.structure.stages import Assignment

Curves = Mapping[int, Sequence[Curve]]
"""Per lane of the pipeline, the curve of each of its devices (or split groups) over the rows of a micro-batch."""


@dataclass(frozen=True)
class ReplicaModel:
    """A replica, priced."""

    pipeline: PipelineShape
    placed: Placed  # the devices of each rank
    assignment: Assignment  # the ops of each stage
    costs: tuple[tuple[DeviceCost, ...], ...]  # per stage, per device
    recomputes: tuple[Recompute, ...]  # per stage
    lanes: Curves  # curves over the rows of a micro-batch
    curve: Curve  # of the whole replica, over its rows of a step
    shardings: tuple[StageSharding | None, ...] = ()  # per stage
    overlappings: tuple[Overlapping | None, ...] = ()  # per split stage, whether it computes its rows in two halves


def model_replica(
    pricing: StagePricing,
    pipeline: PipelineShape,
    placed: Placed,
    assignment: Assignment,
    recomputes: tuple[Recompute, ...],
    num_rows: int,
    rows_about: float,
) -> ReplicaModel:
    """Prices a replica.

    Args:
        num_rows: rows of the global batch, the most that it can be given.
        rows_about: expected rows of a micro-batch, about which prices are lines.
    """
    # The last have least in flight: what is best for them may fit in the others, and is best there too.
    last_first = range(pipeline.num_stages)[::-1]
    priced = [pricing.price(pipeline, assignment, stage, placed, rows_about, recomputes) for stage in last_first][::-1]
    costs = tuple(stage.costs for stage in priced)
    most = -(-num_rows // pipeline.num_micro_batch)
    twice = {
        rank: pricing.prices.held_twice([assignment.parts[stage] for stage in pipeline.stages_of(rank)], pricing.budget)
        for rank in range(pipeline.num_ranks)
    }
    lanes = {lane: _lane_curves(pipeline, placed, costs, stages, most, rows_about, twice) for lane, stages in enumerate(pipeline.lanes)}
    curve = _replica_curve(pipeline, lanes, num_rows, most)
    shardings, overlappings = tuple(stage.sharding for stage in priced), tuple(stage.overlapping for stage in priced)
    return ReplicaModel(pipeline, placed, assignment, costs, recomputes, lanes, curve, shardings, overlappings)


def _lane_curves(
    pipeline: PipelineShape,
    placed: Placed,
    costs: Sequence[Sequence[DeviceCost]],
    stages: Sequence[int],
    most: int,
    rows_about: float,
    held_twice: Mapping[int, int],
) -> tuple[Curve, ...]:
    """Curves of the devices of a lane, or of its split groups (as slow and as full as the group's worst); equal devices share one.

    `held_twice`: per rank, bytes of parameters that several of its stages count; of split groups they are not known.
    """
    names, width = placed[pipeline.stage_rank[stages[0]]], pipeline.width(stages[0])
    others = [stage for stage in pipeline.stages_of(pipeline.stage_rank[stages[0]]) if stage not in stages]
    found: dict[tuple[DeviceCost, ...], Curve] = {}
    curves = []
    for position, name in enumerate(names):
        own = tuple(costs[stage][position] for stage in (*stages, *others))
        if own not in found:
            held_elsewhere = sum(
                costs[stage][position].part.held(pipeline.alive(stage)).at(rows_about / pipeline.num_groups(stage)) for stage in others
            ) - (held_twice[pipeline.stage_rank[stages[0]]] if width == 1 else 0)
            found[own] = _device_curve(pipeline, own[: len(stages)], stages, most, held_elsewhere, name)
        curves.append(found[own])
    return tuple(_group_curve(curves[start : start + width]) for start in range(0, len(names), width))


def _device_curve(
    pipeline: PipelineShape, own: Sequence[DeviceCost], stages: Sequence[int], most: int, held_elsewhere: float, name: str
) -> Curve:
    """The curve of one device over its rows of these stages; `held_elsewhere` bytes belong to other stages."""
    seconds = Line.sum(cost.seconds for cost in own)
    memory = rank_memory((cost.part, pipeline.alive(stage)) for stage, cost in zip(stages, own, strict=True))
    units = np.arange(most + 1, dtype=np.float64)
    fullest = np.max([line.fixed + line.per_row * units for line in memory], axis=0)
    excess = np.maximum.accumulate(np.maximum(fullest + held_elsewhere - own[0].capacity, 0.0))
    waiting = np.sum([cost.waiting(units) for cost in own], axis=0)
    return Curve(seconds.fixed + seconds.per_row * units + waiting, excess, 1, f"{name} (stage {stages[0]})")


def _group_curve(curves: Sequence[Curve]) -> Curve:
    """The curve of devices that take the same rows."""
    if len(curves) == 1:
        return curves[0]
    worst = max(curves, key=lambda curve: float(curve.excess[-1]))
    return Curve(np.max([curve.seconds for curve in curves], axis=0), np.max([curve.excess for curve in curves], axis=0), 1, worst.place)


def _rank_curves(pipeline: PipelineShape, lanes: Curves, most: int) -> list[Curve]:
    """Per rank its curve; several lanes run one after another."""
    found: dict[int, Curve] = {}
    for lane, stages in enumerate(pipeline.lanes):
        rank, curve = pipeline.stage_rank[stages[0]], combine(most, lanes[lane])
        if rank in found:
            first = found[rank]
            excess = np.maximum(first.excess, curve.excess)
            curve = Curve(first.seconds + curve.seconds, excess, max(first.minimum, curve.minimum), first.place)
        found[rank] = curve
    return list(found.values())


def _replica_curve(pipeline: PipelineShape, lanes: Curves, num_rows: int, most: int) -> Curve:
    """Time and memory by the rows of a step, in micro-batches that differ by at most one row."""
    m = pipeline.num_micro_batch
    together = _rank_curves(pipeline, lanes, most)
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


def device_rows(pipeline: PipelineShape, lanes: Curves, num_rows: int) -> dict[int, tuple[int, ...]]:
    """Per lane, the rows of a micro-batch of each device, or split group.

    Copies of a nested pipeline first divide the rows among them, so that each keeps its rows from stage to stage; where that
    does not fit in memory, every stage divides its rows by itself.
    """
    try:
        return _divide(pipeline.lane_copies, lanes, num_rows)
    except MemoryShortage:
        return {lane: divide_units(num_rows, curves) for lane, curves in lanes.items()}


def _divide(node: Copies, lanes: Curves, num_rows: int) -> dict[int, tuple[int, ...]]:
    copies = [_lanes_of_copy(node, lanes, number) for number in range(node.count)]
    shares = divide_units(num_rows, [_copy_curve(node, own, num_rows) for own in copies]) if node.count > 1 else (num_rows,)
    sizes: dict[int, tuple[int, ...]] = dict.fromkeys(node.stages, ())
    for share, own in zip(shares, copies, strict=True):
        for member in node.members:
            inner = {member: divide_units(share, own[member])} if isinstance(member, int) else _divide(member, own, share)
            for rank, rows in inner.items():
                sizes[rank] = (*sizes[rank], *rows)
    return sizes


def _lanes_of_copy(node: Copies, lanes: Curves, number: int) -> dict[int, Sequence[Curve]]:
    found: dict[int, Sequence[Curve]] = {}
    for lane in node.stages:
        width = len(lanes[lane]) // node.count
        found[lane] = lanes[lane][number * width : (number + 1) * width]
    return found


def _copy_curve(node: Copies, own: Curves, num_rows: int) -> Curve:
    """The curve of one copy: its slowest stage."""
    curves = []
    for member in node.members:
        if isinstance(member, int):
            curves.append(combine(num_rows, own[member]))
        else:
            copies = [_copy_curve(member, _lanes_of_copy(member, own, number), num_rows) for number in range(member.count)]
            curves.append(combine(num_rows, copies))
    length = num_rows + 1
    worst = max(curves, key=lambda curve: float(curve.excess[length - 1]))
    return Curve(
        np.max([curve.seconds[:length] for curve in curves], axis=0),
        np.max([curve.excess[:length] for curve in curves], axis=0),
        max(curve.minimum for curve in curves),
        worst.place,
    )


def make_replicas(
    prices: Prices, models: Sequence[ReplicaModel], names: Sequence[Sequence[Sequence[str]]], rows: Sequence[int]
) -> tuple[Replica, ...]:
    """`make_replica` of each; those with shared prices differ only in their devices."""
    known: dict[tuple[int, int, int, tuple[tuple[str, ...], ...]], Replica] = {}
    found = []
    for index, (model, own, num_rows) in enumerate(zip(models, names, rows, strict=True)):
        key = id(model.lanes), id(model.assignment), num_rows, tuple(map(tuple, own))
        if key in known:
            found.append(_on(known[key], index, model.placed))
        else:
            found.append(make_replica(prices, model, own, index, num_rows))
            known[key] = found[-1]
    return tuple(found)


def _on(replica: Replica, index: int, placed: Placed) -> Replica:
    """The same replica on other devices."""
    virtual_devices = [VirtualDevice(names) for names in placed]
    ranks = replica.pipeline.stage_rank
    stages = (replace(stage, virtual_device=virtual_devices[rank]) for stage, rank in zip(replica.stages, ranks, strict=True))
    return replace(replica, index=index, stages=tuple(stages))


def make_replica(prices: Prices, model: ReplicaModel, names: Sequence[Sequence[str]], index: int, num_rows: int) -> Replica:
    """The replica as the plan states it; `names`: per stage, its TaskGraphs; `num_rows` of a step."""
    pipeline = model.pipeline
    largest = -(-num_rows // pipeline.num_micro_batch)
    rows = device_rows(pipeline, model.lanes, largest)
    stages = []
    for stage, rank in enumerate(pipeline.stage_rank):
        part, shares, width = model.assignment.parts[stage], rows[pipeline.lane(stage)], pipeline.width(stage)
        sharding = model.shardings[stage] if model.shardings else None
        overlapping = model.overlappings[stage] if model.overlappings else None
        recomputed = [(segment[0], segment[-1]) for segment in model.recomputes[stage].segments]
        in_halves = overlapping is not None and overlapping.is_chosen
        offload = prices.costs.offloads_activations
        shards = tuple(_with_rows(shard, pipeline, stage, rows) for shard in sharding.shards) if sharding else ()
        unread = _unread(prices.graph, part) if sharding else ()
        stages.append(
            Stage(
                stage,
                tuple(names[stage]),
                part.ops,
                VirtualDevice(model.placed[rank]),
                shares,
                part.parameters,
                split=width,
                shards=with_unread(shards, unread, prices.axes) if unread else shards,
                program=program_of(part.ops, recomputed, in_halves=in_halves, offload=offload),
            )
        )
    edges = tuple(
        Edge(source, target, tensors, round(prices.payload(tensors)[0].at(largest)))
        for (source, target), tensors in model.assignment.edges.items()
    )
    return Replica(index, num_rows, pipeline.pipeline, tuple(stages), edges)


def _unread(graph: ModelGraph, part: Part) -> list[str]:
    """The parameters that a stage holds but does not read."""
    read = graph.parameters_read(part.ops)
    return [name for name in part.parameters if name not in read and graph.parameter_by_name[name].kind == "parameter"]


def _with_rows(shard: Shard, pipeline: PipelineShape, stage: int, rows: Mapping[int, tuple[int, ...]]) -> Shard:
    """A cut of the batch takes the rows of a neighbour on the same devices, so that they need not move."""
    if shard.axis != BATCH:
        return shard
    rank, width = pipeline.stage_rank, pipeline.width(stage)
    neighbours = [other for other in range(len(rank)) if rank[other] == rank[stage] and pipeline.width(other) == 1]
    if width == 1 or not neighbours:
        return shard
    return replace(shard, sizes=rows[pipeline.lane(neighbours[0])][:width])
