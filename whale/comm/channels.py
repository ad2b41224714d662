"""Point-to-point channels: one per (pair of ranks, lane), so that messages of one lane keep their order.

On Gloo a lane is a tag of the world's group. NCCL has no tags and makes two-rank communicators lazily, which can
deadlock: there every lane gets its own group, made in sorted order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale.comm.world import World


@dataclass(frozen=True, order=True, slots=True)
class Lane:
    """One direction of one edge between two ranks.

    Attributes:
        source, target: ranks.
        number: tells lanes of one pair apart.
    """

    source: int
    target: int
    number: int


class Channels:
    """The lanes of one engine.

    Args:
        world: this process among its peers.
        lanes: all lanes of the plan, the same on every rank.

    Attributes:
        wire_device: where tensors must lie to travel; Gloo sends from host memory only.
    """

    def __init__(self, world: World, lanes: Iterable[Lane]) -> None:
        self._groups: dict[Lane, dist.ProcessGroup] = {}
        has_nccl = world.device.type == "cuda" and not world.is_alone and "nccl" in dist.get_backend_config()
        self.wire_device = world.device if has_nccl else torch.device("cpu")
        if not has_nccl:
            return
        for lane in sorted(set(lanes)):
            if lane.source == lane.target:
                continue
            # All ranks take part, as in `Groups`: else members with unlike numbers of groups name this one differently.
            group = dist.new_group(sorted((lane.source, lane.target)), timeout=world.timeout)
            if world.rank in (lane.source, lane.target):
                self._groups[lane] = group

    def send(self, tensor: torch.Tensor, lane: Lane) -> dist.Work:
        """Starts a send; the tensor must stay untouched until the work is done."""
        work = dist.isend(tensor, lane.target, group=self._groups.get(lane), tag=lane.number)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor, lane: Lane) -> dist.Work:
        """Starts a receive into a contiguous tensor."""
        work = dist.irecv(tensor, lane.source, group=self._groups.get(lane), tag=lane.number)
        assert work is not None
        return work

    def close(self) -> None:
        """Destroys the groups made here."""
        for group in self._groups.values():
            with suppress(ValueError):  # the world may have ended, and all groups with it
                dist.destroy_process_group(group)
        self._groups.clear()
