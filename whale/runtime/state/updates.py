"""Buffers that forward writes, in one step: every micro-batch starts from what they held before, and all of them make the new value.

before --+--> micro-batch 0 writes --+
         +--> micro-batch 1 writes --+--> once: what each has made; mean: averaged by rows; sum: what each added
         +--> other replicas' -------+
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from whale.ir.graph import ModelGraph
from whale.ir.updates import UpdateKind
from whale.runtime.program.shard.pieces import Index, part
from whale.runtime.state.buffers import write_held
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.wide import as_real, is_whole, wide, widened

ADDED: tuple[UpdateKind, ...] = ("mean", "sum")
"""What parts of the batch make up together; anything else each of them makes alike, or there is one part."""


class StepBuffers:
    """The buffers that the forward passes of one stage write.

    Args:
        tensors: what this rank holds.
        kinds: of the buffers that the stage writes, by name, without running statistics.

    Attributes:
        made: of the step so far: the new value; of a mean and a sum, this device's addend to it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, UpdateKind]) -> None:
        self._tensors, self._kinds = tensors, kinds
        self._before: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Starts a step."""
        self.made = {}
        self._before = {name: self._tensors[name].detach().clone() for name in self._kinds}

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def fresh(self, name: str) -> torch.Tensor:
        """What a buffer held before the step, to be written by one forward pass."""
        return self._before[name].clone()

    def add(self, name: str, written: torch.Tensor, num_rows: int) -> None:
        """Takes what a micro-batch of so many rows has written."""
        kind, made = self._kinds[name], self.made.get(name)
        if kind not in ADDED:
            self.made.setdefault(name, written.detach())
            return
        addend = widened(written.detach())
        addend = addend * num_rows if kind == "mean" else addend - self._before[name]
        self.made[name] = addend if made is None else made + addend


@dataclass(frozen=True)
class SharedBuffers:
    """What all ranks make of the buffers that their micro-batches have written.

    Attributes:
        holdings: who holds which part of what.
        rank: this rank of the plan; None if idle.
        tensors: what this rank holds.
        add: sums a tensor over all ranks, in place; says what for while it waits.
        device: where this rank computes.
    """

    holdings: Holdings
    rank: int | None
    tensors: Mapping[str, torch.Tensor]
    add: Callable[[torch.Tensor, str], None]
    device: torch.device

    def settle(self, model: ModelGraph, kinds: Mapping[str, UpdateKind], made: Mapping[str, torch.Tensor], num_rows: int) -> None:
        """Puts the new values into the buffers; every rank of the world takes part where some buffer is a mean or a sum.

        Args:
            model: the model in the mode that was run.
            kinds: of the buffers that it writes.
            made: by this rank's micro-batches.
            num_rows: rows of the global batch.
        """
        for name, value in made.items():
            if kinds[name] not in ADDED:
                self.tensors[name].detach().copy_(value)
        names = sorted(name for name, kind in kinds.items() if kind in ADDED)
        if not names:
            return
        specs = [model.parameter_by_name[name].spec for name in names]
        wholes = [torch.zeros(spec.shape, dtype=wide(getattr(torch, spec.dtype)), device=self.device) for spec in specs]
        for name, whole in zip(names, wholes, strict=True):
            if name in made:
                write_held(whole, self._index(name), made[name] / self._num_copies(name))
        flat = torch.cat([as_real(whole).reshape(-1) for whole in wholes])
        if len(self.holdings.plan.devices) > 1:
            self.add(flat, "adding up what was written into buffers")
        for name, whole, total in zip(names, wholes, torch.split(flat, [as_real(whole).numel() for whole in wholes]), strict=True):
            if self.rank is not None and name in self.tensors:
                as_real(whole).copy_(total.view_as(as_real(whole)))
                self._take(name, whole, num_rows if kinds[name] == "mean" else None)

    def _take(self, name: str, total: torch.Tensor, num_rows: int | None) -> None:
        """Makes a buffer the mean over so many rows, or adds a sum to it."""
        target, index = self.tensors[name].detach(), self._index(name)
        own = total if index is None else part(total, index)
        value = widened(target) + own if num_rows is None else own / num_rows
        target.copy_(value.round() if is_whole(target.dtype) else value)

    def _index(self, name: str) -> tuple[Index, ...] | None:
        assert self.rank is not None, "an idle rank holds nothing"
        return self.holdings.index(name, self.holdings.held(name, self.rank))

    def _num_copies(self, name: str) -> int:
        """How many devices of a split group have written the same."""
        assert self.rank is not None, "an idle rank holds nothing"
        device = self.holdings.plan.devices[self.rank]
        stages = (stage for replica in self.holdings.plan.replicas for stage in replica.stages)
        own = next(stage for stage in stages if device in stage.virtual_device.devices and name in stage.parameters)
        return own.split if self._index(name) is None else 1
