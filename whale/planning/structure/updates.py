"""Buffers that forward writes with what only the undivided batch can tell, where a plan divides its rows."""

from __future__ import annotations

from collections.abc import Sequence

from whale.errors import PlanError, WhaleError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Replica
from whale.ir.updates import buffer_updates


def update_faults(graph: ModelGraph, replicas: Sequence[Replica]) -> list[WhaleError]:
    """The buffers that parts of the batch do not make up, with their lines; none where the batch is one part."""
    faults: list[WhaleError] = []
    for name, update in buffer_updates(graph).items():
        num_parts = sum(_num_parts(replica, name) for replica in replicas)
        if update.kind == "whole" and num_parts > 1:
            text = f"a buffer that is written from a batch in {num_parts} parts holds sums or means over rows, or what they do not change"
            faults.append(
                PlanError(
                    f"{text} ({name}: {update.reason})",
                    where=update.where,
                    hint="write buffer += x.sum(0) or buffer.lerp_(x.mean(0), 0.1), or run one replica with one micro-batch",
                )
            )
    return faults


def _num_parts(replica: Replica, name: str) -> int:
    """How many parts of the batch a replica writes a buffer with."""
    groups = max((len(stage.shares) for stage in replica.stages if name in stage.parameters), default=0)
    return groups * replica.pipeline.num_micro_batch
