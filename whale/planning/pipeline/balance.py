"""Divides units over heterogeneous workers so that the slowest is as fast as possible and all fit in memory.

Worker i needs t_i(n) seconds and m_i(n) bytes for n units, both monotone. Giving out units one by one, each to the worker
that would finish it first, the last one sets the time T: the N-th smallest of all values t_i(n) that fit in memory. So one
partial sort finds T, and n_i is the most that worker i can do within T.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from whale.errors import OutOfMemory
from whale.estimate.costs.line import Floats
from whale.units import format_bytes


class MemoryShortage(OutOfMemory):
    """No division fits."""

    num_bytes: int = 0  # the least, over all divisions, of the largest shortage on one device
    sizes: tuple[int, ...] = ()  # a division that attains it


def shortage(message: str, num_bytes: int, sizes: tuple[int, ...]) -> MemoryShortage:
    error = MemoryShortage(
        message,
        hint="more micro-batches (pipeline.num_micro_batch), fewer rows, more stages, recomputation (recompute.policy: auto), "
        "or devices with more memory",
    )
    error.num_bytes, error.sizes = num_bytes, sizes
    return error


@dataclass(frozen=True)
class Curve:
    """What 0, 1, ... N units cost one worker."""

    seconds: Floats  # time for n units at index n; non-decreasing
    excess: Floats  # bytes by which n units overflow its memory, 0 where they fit; non-decreasing
    minimum: int = 0  # the fewest units that it must take
    place: str = ""  # the device that overflows first, for messages

    @cached_property
    def most(self) -> int:
        """The most units that fit; -1 where not even 0 do."""
        return int(np.searchsorted(self.excess, 0.0, side="right")) - 1

    @cached_property
    def fits(self) -> bool:
        return self.most >= self.minimum


def combine(num_units: int, curves: Sequence[Curve]) -> Curve:
    """The curve of several workers that divide their units in the best way, for every number of units."""
    if len(curves) == 1:
        return curves[0]
    minimum = sum(curve.minimum for curve in curves)
    bounds = [min(curve.most, num_units) for curve in curves]
    if not all(curve.fits for curve in curves):
        bounds = [num_units] * len(curves)
    seconds = _merge(num_units, [curve.seconds for curve in curves], [curve.minimum for curve in curves], bounds)
    excess = _merge(num_units, [curve.excess for curve in curves], [curve.minimum for curve in curves], [num_units] * len(curves))
    worst = max(curves, key=lambda curve: float(curve.excess[-1]))
    return Curve(seconds, excess, minimum, worst.place)


def divide_units(num_units: int, curves: Sequence[Curve]) -> tuple[int, ...]:
    """The division with the least time of the slowest worker.

    Raises:
        MemoryShortage: no division fits.
        ValueError: there are fewer units than the minimums.
    """
    minimums = [curve.minimum for curve in curves]
    if sum(minimums) > num_units:
        raise ValueError(f"{num_units} units for {len(curves)} workers that need at least {sum(minimums)}")
    bounds = [min(curve.most, num_units) for curve in curves]
    if sum(bounds) < num_units or not all(curve.fits for curve in curves):
        sizes = _give_out(num_units, [curve.excess for curve in curves], minimums, [num_units] * len(curves))
        worst = max(range(len(curves)), key=lambda i: float(curves[i].excess[sizes[i]]))
        short = int(np.ceil(curves[worst].excess[sizes[worst]]))
        place = curves[worst].place or f"worker {worst}"
        raise shortage(f"out of memory: no division fits, {place} is {format_bytes(short)} ({short} bytes) short", short, sizes)
    return _give_out(num_units, [curve.seconds for curve in curves], minimums, bounds)


def _candidates(num_units: int, values: Sequence[Floats], minimums: Sequence[int], bounds: Sequence[int]) -> Floats:
    """The values beyond the minimums, unsorted, without those above the level of an even division."""
    even = -(-num_units // len(values))
    level = np.inf
    if all(low <= even <= high for low, high in zip(minimums, bounds, strict=True)):
        level = max(float(value[even]) for value in values)
    parts = []
    for value, low, high in zip(values, minimums, bounds, strict=True):
        stop = high + 1 if level == np.inf else max(even, int(np.searchsorted(value[: high + 1], level, side="right")) - 1) + 1
        parts.append(value[low + 1 : stop])
    return np.concatenate(parts)


def _merge(num_units: int, values: Sequence[Floats], minimums: Sequence[int], bounds: Sequence[int]) -> Floats:
    """Per number of units, the least largest value; constant beyond the bounds."""
    floor = max(float(value[low]) for value, low in zip(values, minimums, strict=True))
    merged = np.full(num_units + 1, floor)
    given = np.sort(_candidates(num_units, values, minimums, bounds))[: max(0, num_units - sum(minimums))]
    start = min(sum(minimums) + 1, num_units + 1)
    merged[start : start + len(given)] = np.maximum(given, floor)
    if len(given):
        merged[start + len(given) :] = merged[start + len(given) - 1]
    return merged


def _give_out(num_units: int, values: Sequence[Floats], minimums: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    left = num_units - sum(minimums)
    if left == 0:
        return tuple(minimums)
    level = np.partition(_candidates(num_units, values, minimums, bounds), left - 1)[left - 1]
    sizes, below = [], []
    for value, low, high in zip(values, minimums, bounds, strict=True):
        sizes.append(max(low, int(np.searchsorted(value[: high + 1], level, side="right")) - 1))
        below.append(max(low, int(np.searchsorted(value[: high + 1], level, side="left")) - 1))
    _hand_back(sizes, below, sum(sizes) - num_units)
    return tuple(sizes)


def _hand_back(sizes: list[int], below: Iterable[int], surplus: int) -> None:
    """Takes back units that end exactly at T, whole steps first so that most workers end earlier; later workers first."""
    steps = sorted((size - low, -index) for index, (size, low) in enumerate(zip(sizes, below, strict=True)) if size > low)
    for step, negative in steps:
        taken = min(step, surplus)
        sizes[-negative] -= taken
        surplus -= taken
