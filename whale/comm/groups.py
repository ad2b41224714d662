"""Process groups by rank set, channels between two ranks, and sums over a group.

Equal rank sets share a group; all groups are made in one order on every rank.

The schedule puts all launches in one order on all ranks, so a channel needs no tags: sends and receives between two ranks match
in order. On Gloo operations do not wait for each other, and all channels use the world's group. On NCCL the operations of one
communicator run one after another, so each ordered pair of ranks has its own, or each pair where both directions take turns: a receive
that waits for a gradient then blocks neither activations in the other direction nor messages of other ranks. (One for both directions
is always free of deadlock, by the same order.) A pair that the plan's own batch does not use, such as at uneven rows of a batch of
another size, goes through the world's communicator: correct, but not concurrent with others.

Two Gloo ranks exchange whole tensors where that needs little memory; all other sums are all-reduces:

    all-reduce   halves around the ring and around again: two messages one after another
    two ranks    all of it to the other: one message each way, as many bytes; a + b is commutative, so both have equal bits

Each message waits until its rank is scheduled, longer on busy cores. An in-place exchange needs a buffer, so only small tensors
are exchanged. A sum into other memory receives there, and needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale.comm.waiting import Launched, backend_of, blocks_host
from whale.comm.world import World

RankSet = tuple[int, ...]


class Groups:
    """The process groups of one engine.

    Args:
        rank_sets: every set of ranks that will communicate, the same on all ranks. Groups are made in sorted order, so that no two
            ranks wait for each other.
    """

    def __init__(self, world: World, rank_sets: Iterable[RankSet]) -> None:
        self._world = world
        self._groups: dict[RankSet, dist.ProcessGroup] = {}
        everyone = tuple(range(world.size))
        for ranks in sorted(set(rank_sets)):
            assert ranks == tuple(sorted(set(ranks))), ranks
            if len(ranks) == 1:
                continue
            if ranks == everyone:
                assert dist.group.WORLD is not None
                self._groups[ranks] = dist.group.WORLD
                continue
            group = world.new_group(ranks)
            if group is not None:
                self._groups[ranks] = group
        self._warm_up()

    def _warm_up(self) -> None:
        """Uses each NCCL group once, in one order on all ranks: the first use blocks until all are there."""
        if self._world.has_nccl:
            nothing = torch.zeros(1, device=self._world.device)
            for ranks in sorted(self._groups):
                dist.all_reduce(nothing, group=self._groups[ranks])

    def __getitem__(self, ranks: RankSet) -> dist.ProcessGroup:
        return self._groups[ranks]

    def all_reduce(self, tensor: torch.Tensor, ranks: RankSet) -> Launched | None:
        """Starts an in-place sum over ranks; None for a single rank."""
        return self._started(lambda group: dist.all_reduce(tensor, group=group, async_op=True), tensor, ranks)

    def reduce(self, tensor: torch.Tensor, ranks: RankSet, root: int) -> Launched | None:
        """Starts a sum over ranks, in place on the root; on the others the tensor is undefined afterwards."""
        return self._started(lambda group: dist.reduce(tensor, root, group=group, async_op=True), tensor, ranks)

    def broadcast(self, tensor: torch.Tensor, ranks: RankSet, root: int) -> Launched | None:
        """Starts a broadcast from the root."""
        return self._started(lambda group: dist.broadcast(tensor, root, group=group, async_op=True), tensor, ranks)

    def all_gather(self, found: torch.Tensor, tensor: torch.Tensor, ranks: RankSet) -> Launched | None:
        """Starts to gather tensors of one shape into `found`, in rank order."""
        parts = list(found.view(len(ranks), *tensor.shape).unbind())
        return self._started(lambda group: dist.all_gather(parts, tensor, group=group, async_op=True), tensor, ranks)

    def _started(self, start: Callable[[dist.ProcessGroup], dist.Work | None], tensor: torch.Tensor, ranks: RankSet) -> Launched | None:
        if len(ranks) == 1:
            return None
        group = self._groups[ranks]
        work = start(group)
        return None if work is None else Launched(work, blocks_host(tensor.device, group))

    def close(self) -> None:
        """Destroys the groups made here, not the world's."""
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                self._world.waits.lines.remove(group)
                with suppress(ValueError):  # the world may have ended, and all groups with it
                    dist.destroy_process_group(group)
        self._groups.clear()


@dataclass(frozen=True, order=True, slots=True)
class Channel:
    """An ordered pair of ranks."""

    source: int
    target: int


class Channels:
    """The channels of one engine, shared by all its modes.

    Args:
        shared: those that the plan's batch uses, by the group that they share, the same on every rank; not read where channels need none.
        own_groups: whether they get groups of their own; by default if NCCL carries the messages.

    Attributes:
        wire_device: where tensors must be to be sent.
    """

    def __init__(self, world: World, shared: Iterable[tuple[Channel, ...]], *, own_groups: bool | None = None) -> None:
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._lines = world.waits.lines
        self.wire_device = world.wire_device
        self._blocks_host = not world.has_nccl
        if world.has_nccl if own_groups is None else own_groups:
            for channels in sorted(shared):
                group = world.new_group(sorted((channels[0].source, channels[0].target)))
                if group is not None:
                    self._groups |= dict.fromkeys(channels, group)
            self._warm_up(world)

    def _warm_up(self, world: World) -> None:
        """Sends a byte through each channel, in one order on all ranks: a communicator's first use blocks until both ends are there."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.wire_device)
        for channel in sorted(self._groups):
            (self.send if channel.source == world.rank else self.receive)(byte, channel).work.wait()

    def __len__(self) -> int:
        """Groups of this rank."""
        return len(set(self._groups.values()))

    def send(self, tensor: torch.Tensor, channel: Channel) -> Launched:
        """Starts a send; the tensor must not change until the work is done."""
        work = dist.isend(tensor, channel.target, group=self._groups.get(channel))
        assert work is not None
        return Launched(work, self._blocks_host)

    def receive(self, tensor: torch.Tensor, channel: Channel) -> Launched:
        """Starts a receive into a contiguous tensor."""
        work = dist.irecv(tensor, channel.source, group=self._groups.get(channel))
        assert work is not None
        return Launched(work, self._blocks_host)

    def close(self) -> None:
        """Destroys the groups made here."""
        for group in dict.fromkeys(self._groups.values()):
            self._lines.remove(group)
            with suppress(ValueError):  # the world may have ended, and all groups with it
                dist.destroy_process_group(group)
        self._groups.clear()


SMALL_BYTES = 1 << 18
"""Largest sum by exchange in place: an all-reduce pipelines larger ones, adding one chunk while the next is in flight."""


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Launched | None:
    """Starts an in-place sum over a group, of tensors of one shape. Returns what to wait for; None if the sum is there already."""
    is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    if is_small and _are_two_of_gloo(tensor.device, group):
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return _swapped(received, tensor, lambda: tensor.add_(received), group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return None if work is None else Launched(work, blocks_host(tensor.device, group))


def start_sum_into(total: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Launched | None:
    """Starts a sum over a group into other memory.

    Args:
        total: contiguous; receives the sum.
        own: this rank's term; it must not change until the sum is there.

    Returns:
        What to wait for; None if the sum is there already.
    """
    if _are_two_of_gloo(own.device, group):
        return _swapped(total, own, lambda: total.add_(own), group)
    return start_sum(total.copy_(own), group)


def _are_two_of_gloo(device: torch.device, group: dist.ProcessGroup) -> bool:
    return dist.get_world_size(group) == 2 and backend_of(device, group) == "gloo"


def _swapped(received: torch.Tensor, own: torch.Tensor, add: Callable[[], object], group: dist.ProcessGroup) -> Launched | None:
    sent, sizes = own.contiguous().reshape(-1), [0, 0]
    sizes[1 - dist.get_rank(group)] = sent.numel()
    work = dist.all_to_all_single(received.view(-1), sent, sizes, sizes, group=group, async_op=True)
    if work is None:
        add()
        return None
    return Launched(work, blocks_host=True, finish=add)


MOVED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})
"""Types that NCCL and Gloo both have; of booleans, int16, complex numbers and others one of them lacks some operation."""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes, in one dimension; a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as it is moved: itself, or a view as bytes if it has another type than `MOVED`."""
    return tensor if tensor.dtype in MOVED else flat_bytes(tensor)


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A received value, no gradient, in its reader's type.

    float16 has no number for the limits of bfloat16, with which models mask: they become its own, so that a row of them has a softmax.
    """
    made = value.to(dtype)
    if dtype != torch.float16 or value.dtype == dtype:
        return made
    theirs, own = torch.finfo(torch.bfloat16).max, torch.finfo(dtype).max
    return made.masked_fill_(value == theirs, own).masked_fill_(value == -theirs, -own)
