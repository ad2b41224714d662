"""Buffers that forward writes, in one step: every micro-batch starts from what they held before, and all of them make the new value.

before --+--> micro-batch 0 writes --+
         +--> micro-batch 1 writes --+--> once: what each has made; mean: averaged by rows; sum: what each added
         +--> other replicas' -------+

Running statistics that every replica kept of its own rows are merged into one, averaged by rows. What the buffers were before a step is put
back where the step does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from whale.ir.graph import ModelGraph
from whale.ir.updates import UpdateKind
from whale.runtime.program.shard.pieces import Index, part, write_part
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.wide import as_real, is_whole, wide, widened


def row_shares(holdings: Holdings, rank: int, names: Iterable[str]) -> dict[str, float]:
    """Per buffer, the share of the global batch that a rank of the plan speaks for, 0 where it has not got it.

    Devices of a split group that hold a buffer whole saw the same rows, and share them; those that hold parts each speak for theirs.
    """
    plan, found = holdings.plan, dict.fromkeys(names, 0.0)
    device = plan.devices[rank]
    total = sum(replica.share for replica in plan.replicas)
    for replica in plan.replicas:
        for stage in replica.stages:
            if device in stage.virtual_device.devices:
                group = stage.virtual_device.devices.index(device) // stage.split
                share = replica.share / total * stage.shares[group] / sum(stage.shares)
                for name in found.keys() & set(stage.parameters):
                    is_sharded = holdings.index(name, holdings.held(name, rank)) is not None
                    found[name] = share if is_sharded else share / stage.split
    return found


def merge_buffers(
    holdings: Holdings,
    rank: int | None,
    model: ModelGraph,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    add: Callable[[torch.Tensor, str], None],
    device: torch.device,
) -> None:
    """Replaces each buffer by its average over the ranks that hold it; every rank of the world takes part.

    Args:
        holdings: who holds which part of what.
        rank: this rank of the plan; None if idle.
        model: shapes of the buffers.
        tensors: what this rank holds.
        names: buffers to merge, the same on every rank.
        add: sums a tensor over all ranks, in place; says what for while it waits.
        device: where this rank computes.
    """
    if len(holdings.plan.devices) == 1 or not names:
        return
    shares = {} if rank is None else row_shares(holdings, rank, names)
    indices = {name: None if rank is None else holdings.index(name, holdings.held(name, rank)) for name in names if name in tensors}
    shapes = {name: model.parameter_by_name[name].spec.shape for name in names}
    parts: list[torch.Tensor] = []
    for name in names:
        sums, weights = torch.zeros((2, *shapes[name]), dtype=torch.float64, device=device)
        if share := shares.get(name, 0.0) if name in tensors else 0.0:
            held = tensors[name].detach().double().to(device)
            write_held(sums, indices[name], held * share)
            write_held(weights, indices[name], torch.full_like(held, share))
        parts += [sums.reshape(-1), weights.reshape(-1)]
    flat = torch.cat(parts)
    add(flat, "merging running statistics")
    offset = 0
    for name in names:
        count = model.parameter_by_name[name].spec.num_elements
        merged = (flat[offset : offset + count] / flat[offset + count : offset + 2 * count]).reshape(shapes[name])
        offset += 2 * count
        if name in tensors:
            index, target = indices[name], tensors[name]
            target.detach().copy_((merged if index is None else part(merged, index)).to(target.dtype))


def write_held(whole: torch.Tensor, index: tuple[Index, ...] | None, held: torch.Tensor) -> None:
    """Writes what a rank holds into its place in the whole; None for all of it."""
    if index is None:
        whole.copy_(held)
    else:
        write_part(whole, index, held)


class KeptBuffers:
    """A copy of some buffers, made anew before each step: they move while its batch may still be refused.

    Args:
        buffers: that move, on this rank.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._buffers = [buffer.detach() for buffer in buffers]
        self._before = [torch.empty_like(buffer) for buffer in self._buffers]

    def another(self) -> KeptBuffers:
        """Room for one more copy of the same buffers."""
        return KeptBuffers(self._buffers)

    def keep(self) -> None:
        """Takes down what the buffers hold."""
        copy_all(self._before, self._buffers)

    def put_back(self) -> None:
        """Gives them what was taken down last."""
        copy_all(self._buffers, self._before)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies, on a GPU by one kernel for all of a type: torch copies tensors of several types one by one."""
    of_type: dict[torch.dtype, list[int]] = {}
    for number, target in enumerate(targets):
        of_type.setdefault(target.dtype, []).append(number)
    for numbers in of_type.values():
        torch._foreach_copy_([targets[number] for number in numbers], [sources[number] for number in numbers])


def _clones(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [torch.empty_like(source) for source in sources]
    copy_all(copies, sources)
    return copies


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
        self._fresh: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Starts a step."""
        self.made, self._fresh = {}, {}
        self._before = dict(zip(self._kinds, _clones([self._tensors[name].detach() for name in self._kinds]), strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def fresh(self, name: str) -> torch.Tensor:
        """What a buffer held before the step, to be written by one forward pass."""
        if name not in self._fresh:  # of another micro-batch: those of all buffers at once
            self._fresh = dict(zip(self._before, _clones([*self._before.values()]), strict=True))
        return self._fresh.pop(name)

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
        moved = [name for name in made if kinds[name] not in ADDED]
        copy_all([self.tensors[name].detach() for name in moved], [made[name] for name in moved])
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
