"""Buffers that forward writes: every micro-batch starts from their values before the step, and all together give the new value.

    before --+--> micro-batch 0 writes --+
             +--> micro-batch 1 writes --+--> once: the written value; mean: averaged by rows; sum: the increments are added to (a
             |                           |    multiple of) the value before
             +--> other replicas' -------+

Running statistics, which each replica updates by its own rows, are merged as an average by rows. After a step that does not count,
buffers are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from whale.axes.updates import Update, UpdateKind
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.runtime.program.shard.pieces import Index, part, write_part
from whale.runtime.state.holdings import Holdings


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide(tensor.dtype))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, in the same memory; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_whole(dtype: torch.dtype) -> bool:
    """Whether values of a type are integers, so that a mean of them is rounded."""
    return not dtype.is_floating_point and not dtype.is_complex


def row_shares(holdings: Holdings, rank: int, names: Iterable[str]) -> dict[str, float]:
    """Per buffer, the share of the global batch that a rank of the plan represents, 0 if it does not hold it.

    Devices of a split group that hold a buffer whole saw the same rows, and divide them; those with parts each represent all.
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
    rank: int | None,  # this rank of the plan; None if idle
    model: ModelGraph,  # shapes of the buffers
    tensors: Mapping[str, torch.Tensor],  # what this rank holds
    names: Sequence[str],  # buffers to merge, the same on every rank
    add: Callable[[torch.Tensor, str], None],  # sums a tensor over all ranks, in place; its text names the wait
    device: torch.device,
) -> None:
    """Replaces each buffer by its average over the ranks that hold it. A collective of the world."""
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
    """Writes what a rank holds into its place in the whole; None for all."""
    if index is None:
        whole.copy_(held)
    else:
        write_part(whole, index, held)


class KeptBuffers:
    """Copies of buffers that forward writes, made before each step: its batch may still be refused."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._buffers = [_as_words(buffer.detach()) for buffer in buffers]
        self._pairs = in_types([(torch.empty_like(buffer), buffer) for buffer in self._buffers])

    def another(self) -> KeptBuffers:
        """A second copy of the same buffers."""
        return KeptBuffers(self._buffers)

    def keep(self) -> None:
        for copies, buffers in self._pairs:
            torch._foreach_copy_(copies, buffers)

    def put_back(self) -> None:
        for copies, buffers in self._pairs:
            torch._foreach_copy_(buffers, copies)

    def put_back_where(self, found: torch.Tensor) -> None:
        """`put_back` where `found`, a 0-dim tensor of the device, is 1, and nothing where it is 0; uses up the copies."""
        for copies, buffers in self._pairs:
            if copies[0].dtype is torch.int32:  # exact, for words wrap around
                torch._foreach_sub_(copies, buffers)
                torch._foreach_mul_(copies, found.to(torch.int32))
                torch._foreach_add_(buffers, copies)
            else:
                for copied, buffer in zip(copies, buffers, strict=True):
                    buffer.copy_(torch.where(found > 0, copied, buffer))


Columns = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


def in_types(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Columns:
    """Pairs of tensors in columns, by the type of the first: torch copies lists of mixed types one by one, others on a GPU at once."""
    found: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for pair in pairs:
        for column, tensor in zip(found.setdefault(pair[0].dtype, ([], [])), pair, strict=True):
            column.append(tensor)
    return list(found.values())


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensors."""
    for column, others in in_types(zip(targets, sources, strict=True)):
        torch._foreach_copy_(column, others)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers of 32 bits in the same memory, so that one kernel copies a list of any types; some tensors as they are."""
    is_plain = not tensor.is_complex() and tensor.is_contiguous() and tensor.element_size() % 4 == 0
    return tensor.view(-1).view(torch.int32) if is_plain else tensor


def _clones(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [torch.empty_like(source) for source in sources]
    copy_all(copies, sources)
    return copies


ADDED: tuple[UpdateKind, ...] = ("mean", "sum")
"""Kinds that are combined from all parts of the batch; of those that are not derived either, each part gives the same, or there is one."""


class StepBuffers:
    """The buffers that the forward passes of one stage write, each pass into a copy; until `SharedBuffers.settle` they stay as they were.

    Args:
        tensors: what this rank holds.
        updates: of the buffers, by name, without those that passes write themselves (running statistics).

    Attributes:
        made: of the step so far: the new value; of a mean or a sum, this device's term of it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], updates: Mapping[str, Update]) -> None:
        self._tensors, self._updates = tensors, updates
        self._fresh: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self.made, self._fresh = {}, {}

    def __contains__(self, name: str) -> bool:
        return name in self._updates

    def fresh(self, name: str) -> torch.Tensor:
        """A buffer with its value before the step, to be written by one forward pass."""
        if name not in self._fresh:  # a new micro-batch: copy all buffers at once
            self._fresh = dict(zip(self._updates, _clones([self._tensors[name].detach() for name in self._updates]), strict=True))
        return self._fresh.pop(name)

    def add(self, name: str, written: torch.Tensor, num_rows: int) -> None:
        """Adds what a micro-batch has written."""
        update, made = self._updates[name], self.made.get(name)
        if update.kind not in ADDED:
            self.made.setdefault(name, written.detach())
            return
        addend = widened(written.detach())
        addend = addend * num_rows if update.kind == "mean" else addend - _scaled(self._tensors[name].detach(), update)
        self.made[name] = addend if made is None else made + addend


def _is_made(update: Update) -> bool:
    """Whether what one part has written is the new value."""
    return update.kind not in (*ADDED, "derived")


def _scaled(before: torch.Tensor, update: Update) -> torch.Tensor:
    return widened(before) * update.scale


@dataclass(frozen=True)
class SharedBuffers:
    """Combines what the micro-batches of all ranks have written into buffers."""

    holdings: Holdings
    rank: int | None  # this rank of the plan; None if idle
    tensors: Mapping[str, torch.Tensor]  # what this rank holds
    add: Callable[[torch.Tensor, str], None]  # sums a tensor over all ranks, in place; its text names the wait
    device: torch.device

    def settle(self, model: ModelGraph, plan: Plan, updates: Mapping[str, Update], made: Mapping[str, torch.Tensor], num_rows: int) -> None:
        """Writes the new values into the buffers. A collective of the world if some buffer is a mean or a sum, or some replica had no rows.

        Args:
            model: in the mode that was run.
            plan: that it was run by.
            made: by this rank's micro-batches.
            num_rows: rows of the global batch.
        """
        if not updates:
            return
        if plan.has_idle_replicas:
            made = {**made, **self._from_first_replica(model, [name for name, update in updates.items() if _is_made(update)], made)}
        moved = [name for name in made if _is_made(updates[name])]
        copy_all([self.tensors[name].detach() for name in moved], [made[name] for name in moved])
        names = sorted(name for name, update in updates.items() if update.kind in ADDED)
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
                self._take(name, whole, updates[name], num_rows)

    def _from_first_replica(self, model: ModelGraph, names: Sequence[str], made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the first replica has written, for the ranks that hold it: in bytes, to which the others add zeros."""
        if not names:
            return {}
        specs = [model.parameter_by_name[name].spec for name in names]
        wholes = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device) for spec in specs]
        for name, whole in zip(names, wholes, strict=True):
            if name in made and self._speaks_for(name):
                write_held(whole, self._index(name), made[name])
        flat = torch.cat([as_real(whole).reshape(-1).view(torch.uint8) for whole in wholes])
        self.add(flat, "copying what was written into buffers to replicas without rows")
        found, start = {}, 0
        for name, whole in zip(names, wholes, strict=True):
            own = as_real(whole)
            stop = start + own.numel() * own.element_size()
            own.copy_(flat[start:stop].clone().view(own.dtype).view(own.shape))
            start = stop
            if self.rank is not None and name in self.tensors:
                index = self._index(name)
                found[name] = whole if index is None else part(whole, index)
        return found

    def _speaks_for(self, name: str) -> bool:
        """Whether this rank, which has written a buffer, is the first of those of the first replica that have the same of it."""
        assert self.rank is not None, "an idle rank has written nothing"
        device = self.holdings.plan.devices[self.rank]
        for stage in self.holdings.plan.replicas[0].stages:
            if device in stage.virtual_device.devices and name in stage.parameters:
                return stage.virtual_device.devices.index(device) < (1 if self._index(name) is None else stage.split)
        return False

    def _take(self, name: str, total: torch.Tensor, update: Update, num_rows: int) -> None:
        """Sets a buffer to the mean over the rows, or adds a sum to it."""
        target, index = self.tensors[name].detach(), self._index(name)
        own = total if index is None else part(total, index)
        value = own / num_rows if update.kind == "mean" else _scaled(target, update) + own
        target.copy_(value.round() if is_whole(target.dtype) else value)

    def _index(self, name: str) -> tuple[Index, ...] | None:
        assert self.rank is not None, "an idle rank holds nothing"
        return self.holdings.index(name, self.holdings.held(name, self.rank))

    def _num_copies(self, name: str) -> int:
        """Devices of a split group that have written the same."""
        assert self.rank is not None, "an idle rank holds nothing"
        device = self.holdings.plan.devices[self.rank]
        stages = (stage for replica in self.holdings.plan.replicas for stage in replica.stages)
        own = next(stage for stage in stages if device in stage.virtual_device.devices and name in stage.parameters)
        return own.split if self._index(name) is None else 1
