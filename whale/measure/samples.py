"""Timing a call in rounds that start together on all ranks, and pooling measurements of equal devices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from whale.comm import World
from whale.ir.figure import Figure

Key = TypeVar("Key", bound=Hashable)

ROUND_SECONDS = 0.05  # total of a round's calls: some periods of what throttles a device or a share of a core


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements of one thing by one rank."""

    name: str  # in words
    unit: str  # ``FLOP/s``, ``B/s`` or ``s``
    values: tuple[float, ...]  # one per round

    @staticmethod
    def rates(name: str, unit: str, amount: float, seconds: Iterable[float]) -> Samples:
        """Rates of an amount of work, from its seconds."""
        return Samples(name, unit, tuple(amount / max(each, 1e-12) for each in seconds))


def own_time(device: torch.device) -> Callable[[], float]:
    """A clock that stops while a rank's core runs others: of this thread on a CPU; the wall's on a GPU.

    A rank with a share of a core computes in bursts. A call shorter than a burst takes by wall time what it would on the whole core, or
    several times as much.
    """
    return time.thread_time if device.type == "cpu" else time.perf_counter


@dataclass(frozen=True)
class RoundTimer:
    """Times calls on this rank's device."""

    world: World  # this process among its peers, all of which make the same calls of a clock, in the same order
    num_rounds: int  # samples of each thing
    round_seconds: float = ROUND_SECONDS  # approximate total of a round's calls
    now: Callable[[], float] = time.perf_counter  # wall time, or `own_time`

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the longest of all ranks; a call before it warms up."""
        call()
        (seconds,) = self.rounds(call, num_repeats=1, num_rounds=1)
        return max(float(each) for each in self.world.gather_objects(seconds))  # type: ignore[arg-type]

    def rounds(
        self, call: Callable[[], object] | None, *, num_repeats: int | None = None, num_rounds: int | None = None, num_before: int = 0
    ) -> tuple[float, ...]:
        """Seconds per call in each round.

        Args:
            call: what to time; None on a rank that stays idle meanwhile.
            num_repeats: calls of a round; None for as many as take about `round_seconds`, or as long as one does on the slowest rank: none
                is
                idle while another measures what they share. Untimed ones before them use up what an idle device has saved: a cool GPU's
                clocks,
                or the burst of a share of a core.
            num_rounds: None for the clock's own.
            num_before: fixed number of untimed calls before each round, equal on all ranks.
        """
        repeats = num_repeats or self._repeats(call)
        settles = num_repeats is None and repeats > 1
        found = []
        for _ in range(num_rounds or self.num_rounds):
            self.world.barrier()
            if call is not None:
                for _ in range(num_before):
                    call()
                if settles:
                    self._settle(call, repeats)
                found.append(self._time(call, repeats))
        self.world.barrier()
        return tuple(found)

    def _repeats(self, call: Callable[[], object] | None) -> int:
        begin = time.perf_counter()
        own = self._time(call, 1) if call is not None else 0.0
        wall = max(time.perf_counter() - begin, 1e-9)
        longest = max(float(each) for each in self.world.gather_objects(wall))  # type: ignore[arg-type]
        return max(math.ceil(self.round_seconds / own), math.ceil(longest / wall)) if call is not None else 1

    def _settle(self, call: Callable[[], object], repeats: int) -> None:
        until = time.perf_counter() + self.round_seconds
        while time.perf_counter() < until:
            self._time(call, repeats)  # waits: a GPU's host could give it minutes of work in that time

    def _time(self, call: Callable[[], object], repeats: int) -> float:
        self._finish()
        begin = self.now()
        for _ in range(repeats):
            call()
        self._finish()
        return max((self.now() - begin) / repeats, 1e-9)

    def _finish(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def pooled(found: Iterable[tuple[Key, Samples]]) -> Mapping[Key, tuple[Figure, ...]]:
    """The figures of each group, from the samples of all its members; the group's text is the prefix of their names."""
    values: dict[tuple[Key, str, str], list[float]] = {}
    for key, samples in found:
        values.setdefault((key, samples.name, samples.unit), []).extend(samples.values)
    figures: dict[Key, list[Figure]] = {}
    for (key, name, unit), each in values.items():
        if each:
            figures.setdefault(key, []).append(Figure.of(f"{key}: {name}", unit, each))
    return {key: tuple(each) for key, each in figures.items()}
