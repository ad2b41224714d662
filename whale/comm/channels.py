"""Point-to-point channels: one per ordered pair of ranks, whose messages are started in one order at both ends.

The schedule puts all launches in one order on all ranks, so a channel needs no tags and no more than its order: sends
and receives between two ranks meet in turn. What is left to choose is what waits behind what.

On Gloo nothing does, and all channels are the world's group. On NCCL the operations of one communicator run one after
the other. There each ordered pair between which something travels has a communicator of its own: a receive that waits for
a gradient holds up no activation that goes the other way, nor messages of other ranks. (One for both ways would be free of
deadlock too, by the same order.) A pair that the plan's own batch does not use, such as at the seam of uneven rows for a
batch of another size, goes through the world's communicator: right, only not side by side with others.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale.comm.waiting import Launched
from whale.comm.world import World


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
