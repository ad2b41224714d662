"""The text form of a plan, replica by replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.ir.plan.replica import Replica
from whale.ir.plan.shard import describe_shards
from whale.ir.plan.stage import Stage
from whale.units import format_bytes, format_seconds


def describe_shape(replicas: Sequence[Replica]) -> str:
    """How many replicas of how many stages: ``2 replica(s) x 4 stage(s)``, or ``3 replica(s) of 2, 1, 1 stage(s)``."""
    counts = [replica.pipeline.num_stages for replica in replicas]
    if len(set(counts)) == 1:
        return f"{len(counts)} replica(s) x {counts[0]} stage(s)"
    return f"{len(counts)} replica(s) of {', '.join(map(str, counts))} stage(s)"


def describe_order(replicas: Sequence[Replica]) -> str:
    """The schedules, each once: ``1f1b, 4 micro-batch(es)``, or ``1f1b, 4 micro-batch(es) / gpipe, 2 micro-batch(es)``."""
    return " / ".join(dict.fromkeys(replica.pipeline.order for replica in replicas))


def describe_replica(replica: Replica, micro_batch: tuple[int, int]) -> Iterator[str]:
    """The stages and edges of a replica, with the rows that its devices take of a micro-batch of these rows."""
    for stage in replica.stages:
        yield from _describe_stage(stage, micro_batch)
    for edge in replica.edges:
        yield f"    edge {edge.source} -> {edge.target}: {', '.join(edge.tensors)} ({format_bytes(edge.num_bytes)})"


def _describe_stage(stage: Stage, micro_batch: tuple[int, int]) -> Iterator[str]:
    yield (
        f"    stage {stage.index} [{', '.join(stage.task_graphs)}]: {len(stage.ops)} ops "
        f"{stage.ops[0] if stage.ops else '-'} .. {stage.ops[-1] if stage.ops else '-'}, {len(stage.parameters)} tensors held"
    )
    if stage.shards:
        halves = ", in two halves that take turns" if stage.overlap else ""
        yield f"      groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
    if stage.recomputed:
        yield f"      recomputes {sum(map(len, stage.recomputed))} ops in {len(stage.recomputed)} segment(s)"
    rows = stage.rows(micro_batch[1] - micro_batch[0])
    for position, device in enumerate(stage.virtual_device.devices):
        line = f"      {device}: {rows[position]} rows"
        if stage.estimates:
            e = stage.estimates[position]
            line += (
                f", F {format_seconds(e.forward)}, B {format_seconds(e.backward)}, "
                f"{format_bytes(e.parameter_bytes + e.activation_bytes)} of {format_bytes(e.capacity)}"
            )
        yield line
