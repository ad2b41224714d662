"""Keepers: which owner keeps which part of parameters whose state is sharded over owners (``sharding: owners``).

    shares 2:1    owner 0   |  embedding[0:60]  |  layer 1  |          bytes follow the shares of free memory; a parameter larger
                  owner 1   |  embedding[60:90] | bias |               than an owner's share is cut along dimension 0

A parameter that is cut over split groups is kept by one such group, each device keeping the part that it holds.
The result depends on the plan and the shapes alone: the runtime, the estimate and checkpoints all use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whale.ir.division import divide

Floats = NDArray[np.float64]

Ways = tuple[Mapping[int, int], ...]
"""Sets of devices that together hold a parameter once, each device with its number of elements, or a number in proportion."""

ROWS = "dimension 0"
"""The axis that keepers divide: the parameter's first dimension, whatever logical axes that has."""


@dataclass(frozen=True, slots=True)
class SharedOut:
    """A parameter whose state is sharded over its owners."""

    name: str
    num_rows: int  # size of its first dimension; 1 where it may not be cut
    num_bytes: int  # of its state, over all keepers
    ways: Ways


@dataclass(frozen=True, slots=True)
class Keeping:
    """The keepers of a parameter, and the rows of each in order; `rows` is empty where each keeps what it holds."""

    devices: tuple[int, ...]
    rows: tuple[int, ...] = ()


def deal(parameters: Iterable[SharedOut], shares: Sequence[float]) -> dict[str, Keeping]:
    """Assigns parameters, the largest first, each to the keeper with the least load for its share (`shares`: a weight per device)."""
    ordered = sorted(parameters, key=lambda own: (len(own.ways) > 1, -own.num_bytes))  # first what has no choice
    owners: dict[int, _Owners] = {}  # layers share their ways
    totals = Counter[tuple[int, ...]]()
    for own in ordered:
        if id(own.ways) not in owners:
            owners[id(own.ways)] = _Owners.of(own.ways, shares)
        totals[owners[id(own.ways)].devices] += own.num_bytes
    load, found = np.zeros(len(shares)), dict[str, Keeping]()
    for own in ordered:
        among = owners[id(own.ways)]
        room = among.room(own.num_bytes, totals[among.devices], load) if len(own.ways) > 1 and own.num_rows > 1 else []
        if any(room):
            rows = divide(own.num_rows, room)
            kept = {device: count for device, count in zip(among.devices, rows, strict=True) if count}
            found[own.name] = Keeping(tuple(kept), tuple(kept.values()) if len(kept) > 1 else ())
        else:
            kept = dict(own.ways[among.least_full(own.num_bytes, load)])
            found[own.name] = Keeping(tuple(kept))
        total = max(1, sum(kept.values()))
        for device, count in kept.items():
            load[device] += own.num_bytes * count / total
    return found


@dataclass(frozen=True, slots=True)
class _Owners:
    """The devices that hold some of parameters with equal ways; per device of each way, one way after the other, arrays."""

    devices: tuple[int, ...]  # all of them, each once, ascending
    shares: Floats  # their weights
    at: NDArray[np.int64]  # the device of a way
    parts: Floats  # its part of the parameter
    weights: Floats  # its weight
    starts: NDArray[np.int64]  # per way, where it begins

    @staticmethod
    def of(ways: Ways, shares: Sequence[float]) -> _Owners:
        devices, each = tuple(sorted({device for way in ways for device in way})), np.array(shares, dtype=np.float64)
        at = np.array([device for way in ways for device in way], dtype=np.int64)
        parts = np.array([count / max(1, sum(way.values())) for way in ways for count in way.values()])
        starts = np.cumsum([0, *(len(way) for way in ways[:-1])])
        return _Owners(devices, each[list(devices)], at, parts, each[at], starts)

    def room(self, num_bytes: int, total: int, load: Floats) -> list[float]:
        """Bytes that each device may still take of a total, if a parameter of `num_bytes` is more than any of them takes; else nothing."""
        wanted = total * self.shares / self.shares.sum()
        if num_bytes <= wanted.max():
            return []
        left: list[float] = np.maximum(0.0, wanted - load[list(self.devices)]).tolist()
        return left

    def least_full(self, num_bytes: int, load: Floats) -> int:
        """The way whose fullest device is least full for its weight once it keeps so many bytes."""
        return int(np.maximum.reduceat((load[self.at] + num_bytes * self.parts) / self.weights, self.starts).argmin())
