"""The text form of a plan, replica by replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.ir.plan.replica import Replica
from whale.ir.plan.shard import describe_shards
from whale.ir.plan.stage import Stage
from whale.units import counted, each_counted, format_bytes, format_seconds


def describe_shape(replicas: Sequence[Replica]) -> str:
    """How many replicas of how many stages: ``2 replicas x 4 stages``, or ``3 replicas of 2, 1, 1 stages``."""
    counts = [replica.pipeline.num_stages for replica in replicas]
    if len(set(counts)) == 1:
        return f"{counted(len(counts), 'replica')} x {counted(counts[0], 'stage')}"
    return f"{counted(len(counts), 'replica')} of {each_counted(counts, 'stage')}"


def describe_order(replicas: Sequence[Replica]) -> str:
    """The schedules, each once: ``1f1b, 4 micro-batches``, or ``1f1b, 4 micro-batches / gpipe, 2 micro-batches``."""
    return " / ".join(dict.fromkeys(replica.pipeline.order for replica in replicas))


def describe_replica(replica: Replica, micro_batch: tuple[int, int]) -> Iterator[str]:
    """The stages and edges of a replica, with the rows that its devices take of a micro-batch of these rows."""
    for stage in replica.stages:
        yield from _describe_stage(stage, micro_batch)
    for edge in replica.edges:
        yield f"    edge {edge.source} -> {edge.target}: {', '.join(edge.tensors)} ({format_bytes(edge.num_bytes)})"


def _describe_stage(stage: Stage, micro_batch: tuple[int, int]) -> Iterator[str]:
    yield (
        f"    stage {stage.index} [{', '.join(stage.task_graphs)}]: {counted(len(stage.ops), 'op')} "
        f"{stage.ops[0] if stage.ops else '-'} .. {stage.ops[-1] if stage.ops else '-'}, {counted(len(stage.parameters), 'tensor')} held"
    )
    if stage.shards:
        halves = ", in two halves that take turns" if stage.overlap else ""
        yield f"      groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
    if stage.offloads:
        yield "      what it keeps for backward passes waits on the host"
    if stage.recomputed:
        yield f"      recomputes {counted(sum(map(len, stage.recomputed)), 'op')} in {counted(len(stage.recomputed), 'segment')}"
    rows = stage.rows(micro_batch[1] - micro_batch[0])
    for position, device in enumerate(stage.virtual_device.devices):
        line = f"      {device}: {counted(rows[position], 'row')}"
        if stage.estimates:
            e = stage.estimates[position]
            line += (
                f", F {format_seconds(e.forward)}, B {format_seconds(e.backward)}, "
                f"{format_bytes(e.parameter_bytes + e.activation_bytes)} of {format_bytes(e.capacity)}"
            )
        yield line
