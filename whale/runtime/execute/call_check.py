"""Whether all ranks do the same thing: each says what it does in the first message of it, which has one size whatever that is.

A rank that saves alone, or has one batch fewer, meets the others in this message, so it is an error on all of them at once
instead of a wait without end.
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
    """All ranks of the world.

    Args:
        world: this process among its peers.
        groups: holds the group of all ranks.
        status: where what is waited for is kept.
        watch: told of each wait.
    """

    def __init__(self, world: World, groups: Groups, status: StatusBoard, watch: Watch) -> None:
        self._groups, self._status, self._waits, self._watch = groups, status, world.waits, watch
        self._notice, self._num_noticed = world.notice, 0.0
        self._rank, self._busy = world.rank, torch.zeros(world.size, dtype=torch.float64)
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
            self._status.set(what)  # what fails from here on fails by itself

    def add(self, tensor: torch.Tensor, what: str) -> None:
        """Sums a tensor, in place, and waits for it."""
        self.finish(self.start(tensor), what)

    def say(self, call: Call, rank: int, told: Sequence[float] = ()) -> tuple[torch.Tensor, Launched | None]:
        """Starts the message in which each rank says what it does, what it tells beside, how busy it was, if it is about to end."""
        busy = [0.0] * len(self._ranks)
        busy[self._rank] = self._watch.busy_seconds()
        numbers = _numbers(call, rank, (*told, *(0.0,) * (NUM_TOLD - len(told)), float(self._notice.has_come), *busy))
        return numbers, self.start(numbers)

    def hear(self, said: tuple[torch.Tensor, Launched | None], call: Call, what: str) -> list[float]:
        """Waits for what all ranks together tell.

        Raises:
            RuntimeFault: as `finish`; or some do something else, the same on all.
        """
        self.finish(said[1], what)
        found, size = _read(said[0], call, len(self._ranks)), len(self._ranks)
        *told, self._num_noticed = found[:-size]
        busy = said[0][-size:]
        self._busy = torch.where(busy > 0, busy, self._busy)  # other calls tell of no run
        return told

    @property
    def num_noticed(self) -> int:
        """How many ranks were about to be ended when all last said so: the same on all."""
        return int(self._num_noticed if self._peers else self._notice.has_come)

    def take_busy(self) -> tuple[float, ...]:
        """Per rank of the world, for how long it has computed in the run that it last told of, each told once; 0 where it told nothing.

        Each rank has a place of its own in a sum, so all find the same to the last bit.
        """
        found, self._busy = self._busy, torch.zeros_like(self._busy)
        return tuple(found.tolist())


Call = Literal[
    "step",
    "forward_backward",
    "clip_grad_norm_",
    "update",
    "average",
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
NUM_TOLD = 11 + equal_copies.NUM_TOLD
"""Numbers that a call may tell beside itself."""


def _numbers(call: Call, rank: int, told: Sequence[float]) -> torch.Tensor:
    """What a rank says, to be summed over all of them: per call, whether it is this rank's, and the rank's number; and what it tells."""
    assert len(told) > NUM_TOLD
    values = [0.0] * (2 * len(_CALLS))
    index = 2 * _CALLS.index(call)
    values[index], values[index + 1] = 1.0, float(rank)
    return torch.tensor([*values, *told], dtype=torch.float64)


def _read(summed: torch.Tensor, call: Call, size: int) -> list[float]:
    """What all ranks together tell.

    Raises:
        RuntimeFault: some do something else; the same on all.
    """
    values = summed.tolist()
    told = values[2 * len(_CALLS) :]
    counts = {each: (int(values[2 * index]), int(values[2 * index + 1])) for index, each in enumerate(_CALLS) if values[2 * index]}
    if counts[call][0] != size:
        alone = min(counts, key=lambda each: counts[each][0])
        said = "; ".join(f"{each}: {_who(*found, size)}" for each, found in counts.items())
        raise RuntimeFault(
            f"ranks call different methods of the engine ({said})",
            hint=f"call engine.{alone} on every rank, as often as on the others; rank 0 alone may print, and write files of its own",
        )
    return told


def _who(count: int, ranks: int, size: int) -> str:
    if count == 1:
        return f"rank {ranks} alone"
    if count == size - 1:
        return f"all ranks but {size * (size - 1) // 2 - ranks}"
    return f"{count} ranks"


def call_together(call: Call, argument: float | None, world: World, world_sums: WorldSums, *, asks: bool = False) -> bool:
    """Waits until all ranks are here.

    Args:
        argument: of the call, which all ranks give alike.
        asks: whether this rank asks for something.

    Returns:
        Whether any rank does.

    Raises:
        RuntimeFault: some call something else, or with another argument, or have left.
    """
    if world.is_alone:
        return asks
    # sums of squares of 24 bits are exact; so short a digest tells any two numbers of a script apart
    told = 0 if argument is None else 1 + (zlib.crc32(struct.pack("d", argument)) & 0xFFFFFF)
    total, squares, num_asking, *_ = world_sums.hear(
        world_sums.say(call, world.rank, (float(told), float(told**2), float(asks))), call, call
    )
    if not are_equal(world.size, total, squares):
        raise RuntimeFault(f"ranks call engine.{call} with different arguments (here {argument}, another on some rank)")
    return num_asking > 0


def are_equal(num: float, total: float, squares: float) -> bool:
    """Whether so many integers are equal, by their sum and the sum of their squares, which are exact."""
    return int(num) * int(squares) == int(total) ** 2
