"""The rows of a global batch that one rank needs, and the mark on a batch that holds no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whale.errors import BatchError
from whale.ir.division import intervals
from whale.ir.plan import Plan

Rows = tuple[tuple[int, int], ...]
"""Half-open intervals of global row numbers, ascending, none adjacent to the next."""


@dataclass(frozen=True)
class RankBatch:
    """What a rank reads of a global batch.

    Attributes:
        data: the batch in the user's form, with this rank's rows in ascending order; None where it has none.
        rows: which rows of the global batch these are.
        num_rows: rows of the global batch.
    """

    data: Any
    rows: Rows
    num_rows: int


def rank_rows(plan: Plan, rank: int | None, num_rows: int) -> Rows:
    """The rows that a rank needs for all stages it runs and all their micro-batches; none for a rank outside the plan.

    Raises:
        BatchError: the batch is too small for the plan.
    """
    if rank is None:
        return ()
    device = plan.devices[rank]
    needed: list[tuple[int, int]] = []
    try:
        for replica in plan.replicas:
            for stage in replica.stages:
                if device not in stage.virtual_device.devices:
                    continue
                position = stage.virtual_device.devices.index(device)
                for start, stop in plan.micro_batch_rows(replica.index, num_rows):
                    needed.append(intervals(stage.rows(stop - start), start)[position])
    except ValueError:
        raise _too_small(plan, num_rows) from None
    return merge(needed)


def merge(parts: list[tuple[int, int]]) -> Rows:
    """The union of intervals."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(part for part in parts if part[0] < part[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def check_rows(plan: Plan, num_rows: int) -> None:
    """Checks that a batch gives every device of every stage a row of every micro-batch.

    Raises:
        BatchError: it does not, with both numbers. Every rank raises the same.
    """
    for rank in range(len(plan.devices)):
        rank_rows(plan, rank, num_rows)


def _too_small(plan: Plan, num_rows: int) -> BatchError:
    replicas, micro_batches = len(plan.replicas), plan.num_micro_batch
    widest = max(len(stage.virtual_device.devices) for replica in plan.replicas for stage in replica.stages)
    needed = f"{replicas} replica(s) x {micro_batches} micro-batch(es)" + (f" x {widest} devices of a stage" if widest > 1 else "")
    return BatchError(
        f"a batch needs at least one row for each device and micro-batch: {needed} (the batch: {num_rows} rows)",
        hint="use larger batches or fewer micro-batches (pipeline.num_micro_batch); drop_last=True leaves out a loader's short last batch",
    )
