"""Process groups by their ranks, channels between two ranks, and sums over a group.

Equal rank sets share a group; all are made in one order on every rank.

The schedule puts all launches in one order on all ranks, so a channel needs no tags and no more than its order: sends
and receives between two ranks meet in turn. What is left to choose is what waits behind what. On Gloo nothing does, and all channels are
the world's group. On NCCL the operations of one communicator run one after the other. There each ordered pair between which something
travels has a communicator of its own: a receive that waits for a gradient holds up no activation that goes the other way, nor messages of
other ranks. (One for both ways would be free of deadlock too, by the same order.) A pair that the plan's own batch does not use, such as
at the seam of uneven rows for a batch of another size, goes through the world's communicator: right, only not side by side with others.

Two ranks through Gloo hand each other what they have, where that needs no memory to speak of; all other sums reduce:

    all-reduce   halves around the ring and around again: two messages one after another
    two ranks    all of it to the other: one message each way, as many bytes; a + b on one rank is b + a on the other, to the last bit

Each turn of a message waits until its rank has one, the more so where cores are busy. In place, what is handed over needs memory beside
the tensor, so only little is. Where the sum is to have memory of its own, what comes is received there, and nothing is copied before.
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
        world: this process among its peers.
        rank_sets: every set of ranks that will communicate together, the same on all ranks: groups are
            made in sorted order, so that no two ranks wait for each other.
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
            # All ranks take part: where members alone do, torch names a group by how many each has already, and
            # members that have unlike numbers of groups wait for each other under unlike names.
            with world.speaking("making process groups"):
                group = dist.new_group(list(ranks), timeout=world.timeout)
            if world.rank in ranks:
                self._groups[ranks] = group
                world.waits.lines.add(group)
        self._warm_up()

    def _warm_up(self) -> None:
        """Uses each group once where the first use blocks until all are there: in one order on all ranks."""
        if not self._world.is_alone and backend_of(self._world.device) == "nccl":
            nothing = torch.zeros(1, device=self._world.device)
            for ranks in sorted(self._groups):
                dist.all_reduce(nothing, group=self._groups[ranks])

    def __getitem__(self, ranks: RankSet) -> dist.ProcessGroup:
        return self._groups[ranks]

    def all_reduce(self, tensor: torch.Tensor, ranks: RankSet) -> Launched | None:
        """Starts the sum of a tensor over ranks, in place; None where there is nobody else."""
        return self._started(lambda group: dist.all_reduce(tensor, group=group, async_op=True), tensor, ranks)

    def reduce(self, tensor: torch.Tensor, ranks: RankSet, root: int) -> Launched | None:
        """Starts the sum of a tensor over ranks, in place on one of them; on the others it has no meaning then."""
        return self._started(lambda group: dist.reduce(tensor, root, group=group, async_op=True), tensor, ranks)

    def broadcast(self, tensor: torch.Tensor, ranks: RankSet, root: int) -> Launched | None:
        """Starts to give all ranks the tensor that one of them has."""
        return self._started(lambda group: dist.broadcast(tensor, root, group=group, async_op=True), tensor, ranks)

    def all_gather(self, found: torch.Tensor, tensor: torch.Tensor, ranks: RankSet) -> Launched | None:
        """Starts to give all ranks the tensors of all, of one shape, one behind the other."""
        parts = list(found.view(len(ranks), *tensor.shape).unbind())
        return self._started(lambda group: dist.all_gather(parts, tensor, group=group, async_op=True), tensor, ranks)

    def _started(self, start: Callable[[dist.ProcessGroup], dist.Work | None], tensor: torch.Tensor, ranks: RankSet) -> Launched | None:
        if len(ranks) == 1:
            return None
        group = self._groups[ranks]
        work = start(group)
        return None if work is None else Launched(work, blocks_host(tensor.device, group))

    def close(self) -> None:
        """Destroys the groups made here; the world's own stays."""
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                self._world.waits.lines.remove(group)
                with suppress(ValueError):  # the world may have ended, and all groups with it
                    dist.destroy_process_group(group)
        self._groups.clear()


@dataclass(frozen=True, order=True, slots=True)
class Channel:
    """An ordered pair of ranks.

    Attributes:
        source, target: ranks.
    """

    source: int
    target: int


class Channels:
    """The channels of one engine, shared by all its modes.

    Args:
        world: this process among its peers.
        channels: those that the plan's batch uses, the same on every rank; not asked for where channels need no group.
        own_groups: whether each channel gets a group of its own; by default where NCCL carries the messages.

    Attributes:
        wire_device: where tensors must lie to travel.
    """

    def __init__(self, world: World, channels: Iterable[Channel], *, own_groups: bool | None = None) -> None:
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._lines = world.waits.lines
        self.wire_device = world.wire_device
        has_nccl = self.wire_device.type != "cpu"
        self._blocks_host = not has_nccl
        if has_nccl if own_groups is None else own_groups:
            # All ranks take part, as in `Groups`: else members with unlike numbers of groups name this one differently.
            for channel in sorted({channel for channel in channels if channel.source != channel.target}):
                with world.speaking("making process groups"):
                    group = dist.new_group(sorted((channel.source, channel.target)), timeout=world.timeout)
                if world.rank in (channel.source, channel.target):
                    self._groups[channel] = group
                    self._lines.add(group)
            self._warm_up(world)

    def _warm_up(self, world: World) -> None:
        """Sends a byte down each channel, in one order on all ranks: the first use of a communicator blocks until both ends are there."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.wire_device)
        for channel in sorted(self._groups):
            (self.send if channel.source == world.rank else self.receive)(byte, channel).work.wait()

    def __len__(self) -> int:
        """Groups of this rank."""
        return len(self._groups)

    def send(self, tensor: torch.Tensor, channel: Channel) -> Launched:
        """Starts a send; the tensor must stay untouched until the work is done."""
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
        for group in self._groups.values():
            self._lines.remove(group)
            with suppress(ValueError):  # the world may have ended, and all groups with it
                dist.destroy_process_group(group)
        self._groups.clear()


SMALL_BYTES = 1 << 18
"""The largest small sum: an all-reduce sends more than that in pieces, of which one is added while the next is on its way."""


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Launched | None:
    """Starts the sum of a tensor over a group, in place; it is there once it has been waited for.

    Args:
        tensor: of one shape on all ranks.
        group: torch's.

    Returns:
        What to wait for; None where it is there already.
    """
    is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    if is_small and _are_two_of_gloo(tensor.device, group):
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return _swapped(received, tensor, lambda: tensor.add_(received), group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return None if work is None else Launched(work, blocks_host(tensor.device, group))


def start_sum_into(total: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Launched | None:
    """Starts the sum of a tensor over a group in other memory; it is there once it has been waited for.

    Args:
        total: contiguous, where the sum will be.
        own: of one shape on all ranks; it is read until the sum is there, so nobody may write to it before.
        group: torch's.

    Returns:
        What to wait for; None where it is there already.
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
