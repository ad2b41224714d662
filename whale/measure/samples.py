"""Timing a call in rounds that start together on all ranks, and pooling what ranks have measured of alike devices."""

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

ROUND_SECONDS = 0.05
"""About as long as a round's calls take together: some periods of what throttles a device or a share of a core."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What one rank has measured of one thing.

    Attributes:
        name: of what, in words.
        unit: ``FLOP/s``, ``B/s`` or ``s``.
        values: one per round.
    """

    name: str
    unit: str
    values: tuple[float, ...]

    @staticmethod
    def rates(name: str, unit: str, amount: float, seconds: Iterable[float]) -> Samples:
        """An amount of work per second, from the seconds that it took."""
        return Samples(name, unit, tuple(amount / max(each, 1e-12) for each in seconds))


def own_time(device: torch.device) -> Callable[[], float]:
    """A clock that stands still while a rank's core is another's: of a thread that computes itself; the wall's of a GPU.

    A rank with a share of a core computes in bursts. What is shorter than a burst is all inside of one or not, and takes by the wall
    what it would on the whole core, or several times as much.
    """
    return time.thread_time if device.type == "cpu" else time.perf_counter


@dataclass(frozen=True)
class RoundTimer:
    """Times calls on this rank's device.

    Attributes:
        world: this process among its peers; all of them make the same calls of a clock, in the same order.
        num_rounds: how often each thing is measured.
        round_seconds: about as long as a round's calls take together.
        now: what is read before and after them; that of the wall, or `own_time`.
    """

    world: World
    num_rounds: int
    round_seconds: float = ROUND_SECONDS
    now: Callable[[], float] = time.perf_counter

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
            num_repeats: calls of a round; None for as many as take about `round_seconds`, or as long as one does on the slowest
                rank: none is idle while another measures what they share. Before them come as many as use up what a device has
                saved while it waited: a cool GPU's clocks, or the rest of a share of a core.
            num_rounds: None for the clock's own.
            num_before: calls before each round, untimed, where their number is no matter of this rank alone.
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
    """The figures of each group, from the samples of all its members together.

    Args:
        found: samples, each with the group that they are of; the group's text stands before their names.
    """
    values: dict[tuple[Key, str, str], list[float]] = {}
    for key, samples in found:
        values.setdefault((key, samples.name, samples.unit), []).extend(samples.values)
    figures: dict[Key, list[Figure]] = {}
    for (key, name, unit), each in values.items():
        if each:
            figures.setdefault(key, []).append(Figure.of(f"{key}: {name}", unit, each))
    return {key: tuple(each) for key, each in figures.items()}
