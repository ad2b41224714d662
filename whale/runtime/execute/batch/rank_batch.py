"""The rows of a global batch that one rank needs, and the mark on a batch that holds no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whale.errors import BatchError
from whale.ir.plan import Plan, Stage
from whale.units import counted

Rows = tuple[tuple[int, int], ...]
"""Half-open intervals of global row numbers, ascending, none adjacent to the next."""


_SMALL_BATCH = "use larger batches, or fewer devices that divide rows; drop_last=True leaves out a loader's short last batch"


@dataclass(frozen=True)
class RankBatch:
    """What a rank reads of a global batch.

    Attributes:
        data: the batch in the user's form, with this rank's rows in ascending order; None where it has none.
        rows: which rows of the global batch these are.
        num_rows: rows of the global batch.
        source: the loader that it comes from.
        start, stop: where in the loader's data it begins, and where what follows it does.
    """

    data: Any
    rows: Rows
    num_rows: int
    source: object = field(default=None, compare=False, repr=False)
    start: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    stop: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)


def rank_rows(plan: Plan, rank: int | None, num_rows: int) -> Rows:
    """The rows that a rank needs for all stages it runs and all their micro-batches; none for a rank outside the plan.

    Raises:
        BatchError: the batch is too small for the plan.
    """
    return merge(rank_pieces(plan, rank, num_rows))


def rank_pieces(plan: Plan, rank: int | None, num_rows: int) -> list[tuple[int, int]]:
    """The rows that a rank takes of each micro-batch in each stage it runs; none for a rank outside the plan.

    Raises:
        BatchError: the batch is too small for the plan.
    """
    if rank is None:
        return []
    device = plan.devices[rank]
    needed: list[tuple[int, int]] = []
    for replica in plan.replicas:
        for stage in replica.stages:
            if device in stage.virtual_device.devices:
                position = stage.virtual_device.devices.index(device)
                micro_batches = _micro_batches(plan, replica.index, num_rows)
                _check_stage(stage, replica.index, min(stop - start for start, stop in micro_batches), num_rows)
                needed += [stage.row_intervals(stop - start, start)[position] for start, stop in micro_batches]
    return needed


def _micro_batches(plan: Plan, replica: int, num_rows: int) -> tuple[tuple[int, int], ...]:
    try:
        return plan.micro_batch_rows(replica, num_rows)
    except ValueError:
        raise _too_few_rows(plan, num_rows) from None


def _too_few_rows(plan: Plan, num_rows: int) -> BatchError:
    needed = f"{counted(len(plan.replicas), 'replica')} with {counted(sum(each.num_micro_batch for each in plan.pipelines), 'micro-batch')}"
    return BatchError(
        f"a batch needs at least one row for each micro-batch: {needed} (the batch: {counted(num_rows, 'row')})", hint=_SMALL_BATCH
    )


def _check_stage(stage: Stage, replica: int, smallest: int, num_rows: int) -> None:
    """Checks that every device of a stage gets a row of the smallest micro-batch."""
    if smallest < len(stage.shares):
        whom = "device" if stage.split == 1 else "split group"
        raise BatchError(
            f"a micro-batch needs at least one row for each {whom} of a stage: stage {stage.index} of replica {replica} "
            f"has {len(stage.shares)} (a micro-batch of a batch of {counted(num_rows, 'row')}: {smallest})",
            hint=_SMALL_BATCH,
        )
    if stage.row_shard is not None and min(b - a for a, b in stage.row_intervals(smallest)) < stage.split:
        raise BatchError(
            f"a micro-batch needs at least one row for each device that takes rows of its own: stage {stage.index} of replica {replica} "
            f"has {stage.split} in a group (a micro-batch of a batch of {counted(num_rows, 'row')}: {smallest})",
            hint=_SMALL_BATCH,
        )


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

    Stages that divide equally many rows equally are looked at once, however many replicas there are.

    Raises:
        BatchError: it does not, with both numbers. Every rank raises the same.
    """
    try:
        rows = plan.replica_rows(num_rows)
    except ValueError:
        raise _too_few_rows(plan, num_rows) from None
    checked: set[tuple[int, tuple[int, ...], int, bool]] = set()
    for replica, (first, last) in zip(plan.replicas, rows, strict=True):
        smallest = (last - first) // replica.pipeline.num_micro_batch
        for stage in replica.stages:
            form = (smallest, stage.shares, stage.split, stage.row_shard is not None)
            if form not in checked:
                checked.add(form)
                _check_stage(stage, replica.index, smallest, num_rows)
