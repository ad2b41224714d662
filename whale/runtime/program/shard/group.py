"""A split group as programs use it: its devices, its collectives, and how to wait for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import Groups, Launched, RankSet, Waits, backend_of, blocks_host, start_sum_into
from whale.runtime.program.watch import NOBODY, Watch

CPU = torch.device("cpu")

Arrival = Callable[[], None]
"""Waits for a collective; raises as `Waits.wait`."""


class Gate:
    """A callback that runs once before the next message of a group."""

    def __init__(self) -> None:
        self._before: Callable[[], None] | None = None

    def close(self, before: Callable[[], None]) -> None:
        self._before = before

    def __call__(self) -> None:
        """Called before every message."""
        before, self._before = self._before, None
        if before is not None:
            before()


@dataclass(frozen=True)
class Group:
    """A split group."""

    groups: Groups  # hold torch's groups; programs, and what autograd saves of them, may outlive those
    ranks: tuple[int, ...]  # world ranks of its devices, by position
    device: torch.device = CPU  # of its tensors, which selects the backend
    waits: Waits = field(default_factory=lambda: Waits(timedelta(seconds=300)), compare=False)
    gate: Gate = field(default_factory=Gate, compare=False)  # called before its next message
    watch: Watch = field(default=NOBODY, compare=False)  # called around each wait
    is_unlike: bool = False  # whether its devices have unlike half-precision types: what they exchange in these is in float32

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's; not to be kept."""
        return self.groups[self._members]

    @cached_property
    def _members(self) -> RankSet:
        return tuple(sorted(self.ranks))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def position(self) -> int:
        """Of this device."""
        return self.ranks.index(dist.get_rank())

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Per rank of the process group, the position of its device."""
        return tuple(self.ranks.index(rank) for rank in self._members)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """World ranks of the others."""
        return tuple(rank for rank in self._members if rank != dist.get_rank())

    @cached_property
    def is_gloo(self) -> bool:
        """Gloo has no uneven all-gather and no reduce-scatter."""
        return backend_of(self.device, self.process_group) == "gloo"

    @cached_property
    def _blocks_host(self) -> bool:
        return blocks_host(self.device, self.process_group)

    def all_reduce(self, total: Tensor, own: Tensor, how: dist.ReduceOp.RedOpType, what: str) -> Arrival:
        """Combines the devices' values into `total`, which is contiguous; `own` must not change before that."""
        if how == dist.ReduceOp.SUM:
            return self._launch(lambda: start_sum_into(total, own, self.process_group), what)
        total.copy_(own)
        return self._launch(lambda: self._launched(dist.all_reduce(total, op=how, group=self.process_group, async_op=True)), what)

    def all_gather(self, received: list[Tensor], own: Tensor, what: str) -> Arrival:
        """Receives the value of each device, by rank."""
        return self._launch(lambda: self._launched(dist.all_gather(received, own, group=self.process_group, async_op=True)), what)

    def reduce_scatter(self, total: Tensor, pieces: list[Tensor], what: str) -> Arrival:
        """Sums the devices' pieces for this one; pieces are by rank."""
        return self._launch(lambda: self._launched(dist.reduce_scatter(total, pieces, group=self.process_group, async_op=True)), what)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes_received: list[int], sizes_sent: list[int], what: str) -> Arrival:
        """Exchanges runs of elements, by rank."""

        def start() -> Launched | None:
            group = self.process_group
            return self._launched(dist.all_to_all_single(received, sent, sizes_received, sizes_sent, group=group, async_op=True))

        return self._launch(start, what)

    def _launched(self, work: dist.Work | None) -> Launched | None:
        return None if work is None else Launched(work, self._blocks_host)

    def _launch(self, start: Callable[[], Launched | None], what: str) -> Arrival:
        """Starts a collective; an error in this is a fault of the group, not of an op of the model."""
        self.gate()
        with self.waits.speaking(what, self.peers):
            return partial(self._wait, start(), what)

    def _wait(self, launched: Launched | None, what: str) -> None:
        with self.watch.waiting(what):
            self.waits.wait(launched, what, self.peers)
