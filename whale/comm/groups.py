"""Process groups by their ranks: equal rank sets share one, all are made in one order on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
import torch.distributed as dist

from whale.comm.backend import backend_of, blocks_host
from whale.comm.waiting import Launched
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
        if len(ranks) == 1:
            return None
        group = self._groups[ranks]
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return None if work is None else Launched(work, blocks_host(tensor.device, group))

    def close(self) -> None:
        """Destroys the groups made here; the world's own stays."""
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                self._world.waits.lines.remove(group)
                with suppress(ValueError):  # the world may have ended, and all groups with it
                    dist.destroy_process_group(group)
        self._groups.clear()
