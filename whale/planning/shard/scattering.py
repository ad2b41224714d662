"""Sends tensors between split stages that all devices of a group hold whole as one part per device over the slow link.

    at once                                 scattered
    a0 --- all of it ---> b0                a0 --- its part ---> b0
    a1 --- all of it ---> b1                a1 --- its part ---> b1     then an all-gather inside b, on the fast link
                                            gradients return as parts, then an all-gather inside a

It needs an axis besides the batch, and split groups (of any width) on both ends, and pays where the link between the stages
is much slower than those inside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from whale.axes import Axes, Dimension, axes_of
from whale.axes.labels import label
from whale.axes.values import may_lie_in_parts
from whale.estimate import Line, all_gather_line
from whale.estimate.prices.prices import Prices
from whale.ir.division import divide_evenly
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Choice, Replica, Shard, Stage
from whale.ir.writes import MemoryWrites
from whale.units import format_seconds


@dataclass(frozen=True)
class Scattered:
    """One tensor that crosses in parts."""

    tensor: str
    axis: str
    sizes: tuple[tuple[int, ...], ...]  # per end, the source first, per position of a group
    whole: float  # seconds of crossing whole, both ways
    parts: float  # seconds of crossing in parts, both ways, with the gathers


def scatter_all(replicas: Sequence[Replica], prices: Prices) -> tuple[tuple[Replica, ...], tuple[Choice, ...]]:
    """`scatter_borders` of every replica; equal choices are listed once."""
    found = [scatter_borders(replica, prices, -(-replica.share // replica.pipeline.num_micro_batch)) for replica in replicas]
    return tuple(replica for replica, _ in found), tuple(dict.fromkeys(choice for _, choices in found for choice in choices))


def scatter_borders(replica: Replica, prices: Prices, num_rows: int) -> tuple[Replica, tuple[Choice, ...]]:
    """A replica whose tensors cross in parts where that is faster, and the choices; `num_rows` of a micro-batch."""
    stages, choices = list(replica.stages), []
    for source in replica.stages:
        for tensor, targets in _readers(replica, source).items():
            ends = [stages[index] for index in (source.index, *targets)]
            found = _scattered(tensor, ends, prices, num_rows)
            if found is None or found.parts >= found.whole:
                continue
            for end, sizes in zip(ends, found.sizes, strict=True):
                known = _shard_of(stages[end.index], Shard(found.axis, sizes), prices.graph, prices.axes)
                stages[end.index] = _with_border(stages[end.index], known, tensor, is_source=end.index == source.index)
            choices.append(_explain(found, source, targets))
    return replace(replica, stages=tuple(stages)), tuple(choices)


def _readers(replica: Replica, source: Stage) -> dict[str, list[int]]:
    """Per tensor that a stage hands on, its target stages."""
    found: dict[str, list[int]] = {}
    for edge in replica.edges:
        for tensor in edge.tensors if edge.source == source.index else ():
            found.setdefault(tensor, []).append(edge.target)
    return found


def _scattered(tensor: str, ends: Sequence[Stage], prices: Prices, num_rows: int) -> Scattered | None:
    """How a tensor could cross in parts; None where it cannot."""
    source, *targets = ends
    devices = set(source.virtual_device.devices)
    if any(end.split < 2 for end in ends) or len(prices.graph.by_name[tensor].outputs) != 1:
        return None
    if any(devices & set(end.virtual_device.devices) for end in targets) or _is_bound(tensor, ends, prices.graph):
        return None
    for axis in _axes_beside_the_batch(prices.axes.ops[tensor].outputs[0]):
        size = prices.axes.by_name[axis].size
        if size >= max(end.split for end in ends):
            sizes = tuple(_sizes(axis, size, end) for end in ends)
            return Scattered(tensor, axis, sizes, *_seconds(tensor, sizes, source, targets, prices, num_rows))
    return None


def _is_bound(tensor: str, ends: Sequence[Stage], graph: ModelGraph) -> bool:
    """Whether an end needs the tensor's own memory, or it leaves the model, or crosses in parts already."""
    if tensor in graph.outputs or any(end.border_shard(tensor) for end in ends):
        return True
    for end in ends:
        writes = MemoryWrites(graph, end.ops)
        if writes.is_written_later(tensor) or any(writes.need_same(tensor, op) for op in end.ops if tensor in graph.by_name[op].inputs):
            return True
    return False


def _axes_beside_the_batch(dimensions: tuple[Dimension, ...]) -> Iterator[str]:
    for dimension in dimensions:
        if BATCH not in axes_of(dimension):
            yield from (axis for axis in dict.fromkeys(axes_of(dimension)) if may_lie_in_parts(dimensions, axis))


def _sizes(axis: str, size: int, end: Stage) -> tuple[int, ...]:
    """The sizes in which a stage divides an axis; even ones where it does not."""
    return next((own.sizes for own in end.shards if own.axis == axis), divide_evenly(size, end.split))


def _seconds(
    tensor: str, sizes: Sequence[tuple[int, ...]], source: Stage, targets: Sequence[Stage], prices: Prices, num_rows: int
) -> tuple[float, float]:
    """Seconds of crossing whole and in parts."""
    op = prices.graph.by_name[tensor]
    num_bytes = prices.outputs[tensor].at(num_rows / min(len(source.groups), *(len(end.groups) for end in targets)))
    ways = 2 if op.requires_grad and prices.training else 1
    whole = parts = 0.0
    for end, own in zip(targets, sizes[1:], strict=True):
        largest = max(*sizes[0], *own) / sum(own)
        link = max(
            (prices.link(a, b) for a in source.virtual_device.devices for b in end.virtual_device.devices),
            key=lambda each: each.seconds(num_bytes),
        )
        whole += ways * link.seconds(num_bytes)
        parts += ways * link.seconds(num_bytes * largest) + _gather(end, num_bytes, prices)
    return whole, parts + (_gather(source, num_bytes, prices) if ways == 2 else 0.0)


def _gather(stage: Stage, num_bytes: float, prices: Prices) -> float:
    return max(all_gather_line(prices.cluster, group, Line(num_bytes), 1, 0.0).fixed for group in stage.groups)


def _shard_of(stage: Stage, wanted: Shard, graph: ModelGraph, axes: Axes) -> Shard:
    """The stage's own shard of an axis; else one along which nothing works and nothing is held."""
    known = next((shard for shard in stage.shards if shard.axis == wanted.axis), None)
    if known is not None:
        return known
    holders = dict.fromkeys(holder.rpartition(":")[0] for holder in axes.held_by[wanted.axis])
    met = label(graph, axes, stage.ops, [wanted]).meeting[wanted.axis]
    return replace(wanted, whole_in=met, whole_parameters=tuple(name for name in holders if name in stage.parameters))


def _with_border(stage: Stage, known: Shard, tensor: str, *, is_source: bool) -> Stage:
    """A stage that hands on, or receives, a tensor in parts."""
    handed_on = (*known.handed_on, tensor) if is_source else known.handed_on
    changed = replace(known, handed_on=handed_on, arriving=known.arriving if is_source else (*known.arriving, tensor))
    shards = [changed if shard.axis == known.axis else shard for shard in stage.shards]
    return replace(stage, shards=tuple(shards) if changed in shards else (*shards, changed))


def _explain(found: Scattered, source: Stage, targets: Sequence[int]) -> Choice:
    sizes = " to ".join(dict.fromkeys(":".join(map(str, own)) for own in found.sizes))
    return Choice(
        "bridging",
        f"%{found.tensor} from stage {source.index} to {', '.join(map(str, targets))}",
        f"in parts of {found.axis} {sizes}, gathered on arrival",
        cost=f"{format_seconds(found.parts)} per micro-batch, both ways",
        bound="the link between the stages",
        runner_up=f"whole to every device: {format_seconds(found.whole)}",
    )
