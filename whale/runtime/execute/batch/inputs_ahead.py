"""The rows of a batch on their way to a GPU: once per step, from pinned memory, ahead of the work on them.

The host is ahead of the device, so a copy on a stream of its own runs while the device still computes the step before.

    computing    ...  step 1  ............ | step 2  F0 F1 ...
    copying               rows of step 2 --'
"""

from __future__ import annotations

import torch

from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.runtime.execute.batch.batch_view import BatchView
from whale.runtime.execute.batch.rank_batch import Rows, rank_rows
from whale.runtime.execute.seat import Seat


class InputsAhead:
    """Brings what the stages of a rank read of a batch to where they compute.

    Args:
        plan: how rows are divided.
        seat: this rank's.
        model: says which inputs its stages read.
        device: where it computes.
    """

    def __init__(self, plan: Plan, seat: Seat, model: ModelGraph, device: torch.device) -> None:
        self._plan, self._rank, self._device = plan, seat.rank, device
        stages = (stage for stage in plan.replicas[seat.replica].stages if plan.devices[seat.rank] in stage.virtual_device.devices)
        read = {source for stage in stages for name in stage.ops for source in model.by_name[name].inputs}
        self._names = tuple(op.name for op in model.ops if op.kind == "input" and op.name in read)
        self._rows: dict[int, Rows] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: BatchView) -> BatchView:
        """The batch with what this rank reads of it where it is read; what lies there already is as it was."""
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
