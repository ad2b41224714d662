"""The rows of a global batch that one rank needs, has, and shares with others.

Ranks that read the same rows compare digests in one sum: the lowest rank adds its digest as often as there are others, and each
other subtracts its own.

    rank 0   rows 0:4   + 1 x d(0:4)
    rank 1   rows 0:4   - 1 x d(0:4)     sum 0

A digest reads a sample of each tensor, so that it takes microseconds for any size: enough to detect other rows, or another order, but
no proof of equality.

Rows go to a GPU once per step from pinned memory, on a stream of their own, while the device still computes the step before:

    computing    ...  step 1  ............ | step 2  F0 F1 ...
    copying               rows of step 2 --'
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import torch

from whale.errors import BatchError, first_few
from whale.ir.graph import NUM_ROWS, ModelGraph
from whale.ir.plan import Plan, Stage
from whale.runtime.execute.roster import RankPlace
from whale.units import counted

Rows = tuple[tuple[int, int], ...]
"""Half-open intervals of global row numbers, ascending, not adjacent."""


_SMALL_BATCH = "use larger batches, or fewer devices that divide rows; drop_last=True leaves out a loader's short last batch"


def rank_rows(plan: Plan, rank: int | None, num_rows: int) -> Rows:
    """The rows that a rank needs for all its stages and micro-batches; none for a rank outside the plan.
    Raises BatchError if the batch is too small for the plan.
    """
    return merge(rank_pieces(plan, rank, num_rows))


def rank_pieces(plan: Plan, rank: int | None, num_rows: int) -> list[tuple[int, int]]:
    """The rows that a rank takes of each micro-batch in each of its stages; otherwise as `rank_rows`."""
    if rank is None:
        return []
    device = plan.devices[rank]
    needed: list[tuple[int, int]] = []
    for replica in plan.replicas:
        for stage in replica.stages:
            if device in stage.virtual_device.devices:
                position = stage.virtual_device.devices.index(device)
                micro_batches = _micro_batches(plan, replica.index, num_rows)
                if micro_batches:
                    _check_stage(stage, replica.index, min(stop - start for start, stop in micro_batches), num_rows)
                needed += [stage.row_intervals(stop - start, start)[position] for start, stop in micro_batches]
    return needed


def _micro_batches(plan: Plan, replica: int, num_rows: int) -> tuple[tuple[int, int], ...]:
    try:
        return plan.micro_batch_rows(replica, num_rows)
    except ValueError:
        raise _too_few_rows(plan, num_rows) from None


def _too_few_rows(plan: Plan, num_rows: int) -> BatchError:
    counts = [each.num_micro_batch for each in plan.pipelines]
    each = f"{counted(counts[0], 'micro-batch')} each" if len(set(counts)) == 1 else f"{first_few([*map(str, counts)])} micro-batches"
    needed = f"{counted(len(plan.replicas), 'replica')} of {each}"
    return BatchError(f"the batch has {counted(num_rows, 'row')}, fewer than the plan needs: one for each of {needed}", hint=_SMALL_BATCH)


def _check_stage(stage: Stage, replica: int, smallest: int, num_rows: int) -> None:
    """Checks that every device of a stage gets a row of the smallest micro-batch."""
    if smallest < len(stage.shares):
        whom = "device" if stage.split == 1 else "split group"
        raise BatchError(
            f"a micro-batch of a batch of {counted(num_rows, 'row')} has {smallest}, fewer than the {counted(len(stage.shares), whom)} of "
            f"stage {stage.index} of replica {replica}, each of which needs one",
            hint=_SMALL_BATCH,
        )
    if stage.row_shard is not None and min(b - a for a, b in stage.row_intervals(smallest)) < stage.split:
        raise BatchError(
            f"a micro-batch of a batch of {counted(num_rows, 'row')} has {smallest}, fewer than the {stage.split} devices of a group of "
            f"stage {stage.index} of replica {replica}, each of which needs one",
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


def check_rows(plan: Plan, num_rows: int, *, trains: bool = False) -> None:
    """Raises `BatchError`, equal on every rank, unless every device of every stage gets a row of every micro-batch, and in training every
    group of ranks that steps on its own.

    Stages with equal divisions of equally many rows are checked once, however many replicas there are.
    """
    try:
        rows = plan.replica_rows(num_rows)
    except ValueError:
        raise _too_few_rows(plan, num_rows) from None
    if trains and plan.sync_groups and 0 in plan.sync_rows(num_rows):
        raise BatchError(
            f"a batch of {counted(num_rows, 'row')} leaves a group of devices that steps on its own without any (of each: "
            f"{', '.join(map(str, plan.sync_rows(num_rows)))})",
            hint="leave out the last, smaller batch (drop_last=True), or set communication.sync_steps: 1",
        )
    checked: set[tuple[int, tuple[int, ...], int, bool]] = set()
    for replica, (first, last) in zip(plan.replicas, rows, strict=True):
        if not replica.pipeline.num_micro_batch:
            continue
        smallest = (last - first) // replica.pipeline.num_micro_batch
        for stage in replica.stages:
            form = (smallest, stage.shares, stage.split, stage.row_shard is not None)
            if form not in checked:
                checked.add(form)
                _check_stage(stage, replica.index, smallest, num_rows)


@dataclass(frozen=True)
class BatchView:
    """A batch, or a rank's rows of one."""

    leaves: Mapping[str, torch.Tensor]  # tensors by the name of their input op
    with_rows: frozenset[str]  # names of the leaves whose dimension 0 is the batch; the others are whole
    num_rows: int  # rows of the global batch
    held: tuple[tuple[int, int], ...]  # global row intervals that the leaves hold, ascending
    place: str | None = None  # names the global batch of a loader of which each rank reads its own rows; None if all ranks were given all
    beside: str | None = None  # names the batch of a loader that the script has in hand, where it passed another without a tensor of it

    @property
    def is_global(self) -> bool:
        """Whether every row is here."""
        return self.held == ((0, self.num_rows),)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A leaf's rows ``start:stop`` of the global batch, or all of a leaf without rows."""
        leaf = self.leaves[name]
        if name not in self.with_rows:
            return leaf
        offset = 0
        for low, high in self.held:
            if low <= start and stop <= high:
                if stop - start == len(leaf):
                    return leaf
                return leaf.narrow(0, offset + start - low, stop - start)
            offset += high - low
        raise AssertionError(f"rows {start}:{stop} are not among {self.held}")

    def picked(self, names: Iterable[str], rows: tuple[tuple[int, int], ...], move: Callable[[torch.Tensor], torch.Tensor]) -> BatchView:
        """Only some leaves and rows, those on the host moved.

        Args:
            rows: global row intervals, ascending, each within one that is held.
            move: applied to each leaf on the host.
        """
        leaves = {}
        for name in names:
            pieces = [self.rows(name, start, stop) for start, stop in rows] if name in self.with_rows else [self.leaves[name]]
            leaf = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            leaves[name] = move(leaf) if leaf.device.type == "cpu" else leaf
        return replace(self, leaves=leaves, held=rows)

    def rows_on(self, device: torch.device, name: str, start: int, stop: int) -> torch.Tensor:
        """The result of `rows` on a device, by an asynchronous copy from pinned memory."""
        rows = self.rows(name, start, stop)
        if device.type == "cuda" and rows.device.type == "cpu":
            rows = rows.pin_memory()
        return rows.to(device, non_blocking=True)


SAMPLE = 1 << 13
"""Elements of a tensor that a digest reads."""
BITS = 20
"""Of a digest: the sum of 8,192 ranks' squared digests is exact in float64."""


def digests(leaves: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A digest of each tensor; waits for those on a device."""
    return {name: _digest(leaf.detach()) for name, leaf in leaves.items()}


def combined(of_leaves: Mapping[str, int]) -> int:
    """All digests as one of `BITS` bits."""
    mixed = reduce(lambda total, value: zlib.crc32(value.to_bytes(4, "little"), total), of_leaves.values(), 0)
    return mixed & ((1 << BITS) - 1)


def on_host(leaves: Mapping[str, torch.Tensor]) -> bool:
    """Whether digests wait for no device."""
    return all(leaf.device.type == "cpu" for leaf in leaves.values())


def _digest(leaf: torch.Tensor) -> int:
    step = max(1, leaf.numel() // SAMPLE) | 1  # odd, to sample different columns of each row
    if leaf.is_contiguous():
        sample = leaf.view(-1)[::step]
    else:  # by index, to copy only the sample
        sample = leaf[torch.unravel_index(torch.arange(0, leaf.numel(), step, device=leaf.device), leaf.shape)]
    return zlib.crc32(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())


_WEIGHTS = 1021
"""Pieces have different weights up to this, so that differences do not cancel."""


@dataclass(frozen=True)
class SharedPiece:
    """Rows ``start:stop`` of the global batch that several ranks read, and the factor of this rank's digest."""

    start: int
    stop: int
    factor: int


def shared_pieces(plan: Plan, rank_place: RankPlace, num_rows: int) -> tuple[SharedPiece, ...]:
    """The pieces of a batch that this rank and others read. Replicas share none."""
    devices = {device for stage in plan.replicas[rank_place.replica].stages for device in stage.virtual_device.devices}
    rows = {rank: rank_rows(plan, rank, num_rows) for rank in sorted(plan.rank_of[device] for device in devices)}
    bounds = sorted({bound for intervals in rows.values() for interval in intervals for bound in interval})
    found = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        holders = [rank for rank, intervals in rows.items() if any(low <= start and stop <= high for low, high in intervals)]
        if rank_place.rank in holders and len(holders) > 1:
            sign = len(holders) - 1 if rank_place.rank == holders[0] else -1
            found.append(SharedPiece(start, stop, sign * (1 + number % _WEIGHTS)))
    return tuple(found)


def balance(batch: BatchView, pieces: Sequence[SharedPiece]) -> int:
    """This rank's term of a sum that is zero if all ranks have read the same; waits for tensors on a device."""
    names = sorted(batch.with_rows)
    return sum(piece.factor * combined(digests({name: batch.rows(name, piece.start, piece.stop) for name in names})) for piece in pieces)


class InputPrefetch:
    """Copies what the stages of a rank read of a batch to their device.

    Args:
        plan: how rows are divided.
        model: says which inputs its stages read.
    """

    def __init__(self, plan: Plan, rank_place: RankPlace, model: ModelGraph, device: torch.device) -> None:
        self._plan, self._rank, self._device = plan, rank_place.rank, device
        device_name = plan.devices[rank_place.rank]
        stages = (stage for stage in plan.replicas[rank_place.replica].stages if device_name in stage.virtual_device.devices)
        read = {source for stage in stages for name in stage.ops for source in model.by_name[name].inputs}
        self._names = tuple(op.name for op in model.ops if op.kind == "input" and op.name in read and op.name != NUM_ROWS)
        self._rows: dict[int, Rows] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: BatchView) -> BatchView:
        """The batch with this rank's inputs on its device."""
        if self._stream is None:
            return batch
        if batch.num_rows not in self._rows:
            self._rows[batch.num_rows] = rank_rows(self._plan, self._rank, batch.num_rows)
        mine = batch.picked(self._names, self._rows[batch.num_rows], self._send)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for leaf in mine.leaves.values():
            leaf.record_stream(computing)
        return mine

    def _send(self, leaf: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return leaf.pin_memory().to(self._device, non_blocking=True)
