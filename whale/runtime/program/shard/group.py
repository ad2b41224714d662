"""A split group as programs see it: who is in it, what goes over its wire, and how long to wait."""

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
"""Waits for what was begun; fails with a `RuntimeFault` if a peer died or the limit passed, and names what it was for."""


class Gate:
    """What must have happened before the next message of a group: nothing, or what `close` was given."""

    def __init__(self) -> None:
        self._before: Callable[[], None] | None = None

    def close(self, before: Callable[[], None]) -> None:
        """The next message waits for this."""
        self._before = before

    def __call__(self) -> None:
        """Comes before every message."""
        before, self._before = self._before, None
        if before is not None:
            before()


@dataclass(frozen=True)
class Group:
    """A split group.

    Attributes:
        groups: which hold torch's; programs, and what autograd keeps of them, may live longer than those.
        ranks: world ranks of its devices, by position.
        device: where its tensors lie, which decides what carries them.
        waits: how its collectives are waited for.
        gate: what its next message waits for.
        watch: told of each wait.
    """

    groups: Groups
    ranks: tuple[int, ...]
    device: torch.device = CPU
    waits: Waits = field(default_factory=lambda: Waits(timedelta(seconds=300)), compare=False)
    gate: Gate = field(default_factory=Gate, compare=False)
    watch: Watch = field(default=NOBODY, compare=False)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's; not to be kept."""
        return self.groups[self._members]

    @cached_property
    def _members(self) -> RankSet:
        return tuple(sorted(self.ranks))

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.ranks)

    @cached_property
    def position(self) -> int:
        """Of this device among them."""
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
        """Whether it speaks Gloo, which has no uneven all-gather and no native reduce-scatter."""
        return backend_of(self.device, self.process_group) == "gloo"

    @cached_property
    def _blocks_host(self) -> bool:
        return blocks_host(self.device, self.process_group)

    def all_reduce(self, total: Tensor, own: Tensor, how: dist.ReduceOp.RedOpType, what: str) -> Arrival:
        """Combines the devices' values in other, contiguous memory; nobody may write to the own one until it is there."""
        if how == dist.ReduceOp.SUM:
            return self._launch(lambda: start_sum_into(total, own, self.process_group), what)
        total.copy_(own)
        return self._launch(lambda: self._launched(dist.all_reduce(total, op=how, group=self.process_group, async_op=True)), what)

    def all_gather(self, received: list[Tensor], own: Tensor, what: str) -> Arrival:
        """Receives the value of each device, by rank."""
        return self._launch(lambda: self._launched(dist.all_gather(received, own, group=self.process_group, async_op=True)), what)

    def reduce_scatter(self, total: Tensor, pieces: list[Tensor], what: str) -> Arrival:
        """Sums what each device has for this one; pieces are by rank."""
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
        """Starts a collective; one that cannot be started is the group's fault, and no op's of the model.

        Raises:
            RuntimeFault: a peer died.
        """
        self.gate()
        with self.waits.speaking(what, self.peers):
            return partial(self._wait, start(), what)

    def _wait(self, launched: Launched | None, what: str) -> None:
        """Waits for what was started.

        Raises:
            RuntimeFault: a peer died or the limit passed; names what it was for and the ranks.
        """
        with self.watch.waiting(what):
            self.waits.wait(launched, what, self.peers)
