"""Checks that all ranks make the same call of the engine: each reports its call in a first message of fixed size.

A rank that saves alone, or has one batch fewer, meets the others in this message, so that all raise at once instead of waiting
forever.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Literal, get_args

import torch

import whale.runtime.execute.equal_copies as equal_copies
from whale.comm import Groups, Launched, World, start_sum
from whale.errors import RuntimeFault
from whale.runtime.execute.status import StatusBoard
from whale.runtime.program.watch import Watch


class WorldSums:
    """Sums over all ranks of the world.

    Args:
        groups: holds the group of all ranks.
        status: shows what is waited for.
        watch: called for each wait.

    Attributes:
        own_affordable: what this rank reports as `num_affordable`; that of rank 0 counts.
    """

    def __init__(self, world: World, groups: Groups, status: StatusBoard, watch: Watch) -> None:
        self._groups, self._status, self._waits, self._watch = groups, status, world.waits, watch
        self._notice, self._num_noticed = world.notice, 0.0
        self.own_affordable, self._num_affordable = 0, 0.0
        self._rank, self._busy = world.rank, torch.zeros(world.size, dtype=torch.float64)
        self._ranks = tuple(range(world.size))
        self._peers = tuple(rank for rank in self._ranks if rank != world.rank)

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, whose sums are those of all."""
        return not self._peers

    def start(self, tensor: torch.Tensor) -> Launched | None:
        """Starts an in-place sum; None for a single rank."""
        return start_sum(tensor, self._groups[self._ranks]) if self._peers else None

    def finish(self, work: Launched | None, what: str) -> None:
        """Waits for a sum. Raises RuntimeFault if a peer died or the wait timed out."""
        if work is not None:
            self._status.set(what, self._peers)
            with self._watch.waiting(what):
                self._waits.wait(work, what, self._peers)
            self._status.set(what)  # later faults do not concern the peers

    def add(self, tensor: torch.Tensor, what: str) -> None:
        """Sums a tensor, in place, and waits."""
        self.finish(self.start(tensor), what)

    def report(self, call: Call, rank: int, report: Sequence[float] = ()) -> tuple[torch.Tensor, Launched | None]:
        """Starts the message with this rank's call, its numbers, its SIGTERM notice, what it can pay for traces and its compute time."""
        busy = [0.0] * len(self._ranks)
        busy[self._rank] = self._watch.busy_seconds()
        affordable = 0 if rank else self.own_affordable
        numbers = _numbers(call, rank, (*report, *(0.0,) * (NUM_REPORTED - len(report)), float(self._notice.has_come), affordable, *busy))
        return numbers, self.start(numbers)

    def collect(self, started: tuple[torch.Tensor, Launched | None], call: Call, what: str) -> list[float]:
        """Waits for the sums of all ranks' numbers. Raises RuntimeFault as `finish`, or on all ranks if some make another call."""
        self.finish(started[1], what)
        found, size = _read(started[0], call, len(self._ranks)), len(self._ranks)
        *numbers, self._num_noticed, self._num_affordable = found[:-size]
        busy = started[0][-size:]
        self._busy = torch.where(busy > 0, busy, self._busy)  # other calls report no run
        return numbers

    @property
    def num_noticed(self) -> int:
        """Ranks that had received SIGTERM at the last message: equal on all ranks."""
        return int(self._num_noticed if self._peers else self._notice.has_come)

    @property
    def num_affordable(self) -> int:
        """Times that rank 0 could pay for tracing the model again, at the last message: equal on all ranks."""
        return int(self._num_affordable) if self._peers else self.own_affordable

    def take_busy(self) -> tuple[float, ...]:
        """Per rank of the world, its compute time in its last reported run, each returned once; 0 for none.

        Each rank has its own element in a sum, so all ranks have equal bits.
        """
        found, self._busy = self._busy, torch.zeros_like(self._busy)
        return tuple(found.tolist())


Call = Literal[
    "step",
    "forward_backward",
    "clip_grad_norm_",
    "update",
    "average",
    "sync_weights",
    "evaluate(averaged=True)",
    "predict(averaged=True)",
    "state_dict(averaged=True)",
    "evaluate",
    "predict",
    "state_dict",
    "load_state_dict",
    "save",
    "load",
    "resume",
    "replan",
    "rebalance",
]

_CALLS: tuple[Call, ...] = get_args(Call)
NUM_REPORTED = 11 + equal_copies.NUM_REPORTED
"""Numbers that a call may send."""


def _numbers(call: Call, rank: int, report: Sequence[float]) -> torch.Tensor:
    """A rank's message, to be summed over all: per call, whether it is this rank's, and the rank's number; then its numbers."""
    assert len(report) > NUM_REPORTED
    values = [0.0] * (2 * len(_CALLS))
    index = 2 * _CALLS.index(call)
    values[index], values[index + 1] = 1.0, float(rank)
    return torch.tensor([*values, *report], dtype=torch.float64)


def _read(summed: torch.Tensor, call: Call, size: int) -> list[float]:
    """The summed numbers; raises `RuntimeFault`, on all ranks, if some make another call."""
    values = summed.tolist()
    numbers = values[2 * len(_CALLS) :]
    counts = {each: (int(values[2 * index]), int(values[2 * index + 1])) for index, each in enumerate(_CALLS) if values[2 * index]}
    if counts[call][0] != size:
        alone = min(counts, key=lambda each: counts[each][0])
        said = "; ".join(f"{each}: {_who(*found, size)}" for each, found in counts.items())
        raise RuntimeFault(
            f"ranks call different methods of the engine ({said})",
            hint=f"call engine.{alone} on every rank, as often as on the others; rank 0 alone may print, and write files of its own",
        )
    return numbers


def _who(count: int, ranks: int, size: int) -> str:
    if count == 1:
        return f"rank {ranks} alone"
    if count == size - 1:
        return f"all ranks but {size * (size - 1) // 2 - ranks}"
    return f"{count} ranks"


def call_together(call: Call, argument: float | None, world: World, world_sums: WorldSums, *, asks: bool = False) -> bool:
    """Waits until all ranks are here.

    Args:
        call, argument: the same on all ranks.
        asks: whether this rank requests something.

    Returns:
        Whether any rank does.

    Raises:
        RuntimeFault: some call something else, or with another argument, or have left.
    """
    if world.is_alone:
        return asks
    # sums of squares of 24 bits are exact, and 24 bits distinguish the few arguments of a script
    digest = 0 if argument is None else 1 + (zlib.crc32(struct.pack("d", argument)) & 0xFFFFFF)
    total, squares, num_asking, *_ = world_sums.collect(
        world_sums.report(call, world.rank, (float(digest), float(digest**2), float(asks))), call, call
    )
    if not are_equal(world.size, total, squares):
        raise RuntimeFault(f"ranks call engine.{call} with different arguments (here {argument}, another on some rank)")
    return num_asking > 0


def are_equal(num: float, total: float, squares: float) -> bool:
    """Whether `num` integers are equal, by their exact sum and sum of squares."""
    return int(num) * int(squares) == int(total) ** 2
