"""Sums over all ranks of the world, each with a name under which it is waited for."""

from __future__ import annotations

import torch

from whale.comm import Groups, Launched, World, start_sum
from whale.runtime.execute.status import StatusBoard
from whale.runtime.program.watch import Watch


class Everyone:
    """All ranks of the world.

    Args:
        world: this process among its peers.
        groups: holds the group of all ranks.
        status: where what is waited for is kept.
        watch: told of each wait.
    """

    def __init__(self, world: World, groups: Groups, status: StatusBoard, watch: Watch) -> None:
        self._groups, self._status, self._waits, self._watch = groups, status, world.waits, watch
        self._ranks = tuple(range(world.size))
        self._peers = tuple(rank for rank in self._ranks if rank != world.rank)

    def start(self, tensor: torch.Tensor) -> Launched | None:
        """Starts the sum of a tensor, in place; None where there is nobody else."""
        return start_sum(tensor, self._groups[self._ranks]) if self._peers else None

    def finish(self, work: Launched | None, what: str) -> None:
        """Waits for a sum.

        Raises:
            RuntimeFault: a peer died or the wait outlasted its limit; says what for.
        """
        if work is not None:
            self._status.set(what, self._peers)
            with self._watch.waiting(what):
                self._waits.wait(work, what, self._peers)

    def add(self, tensor: torch.Tensor, what: str) -> None:
        """Sums a tensor, in place, and waits for it."""
        self.finish(self.start(tensor), what)
