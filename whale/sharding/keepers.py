"""Keepers: which owner keeps which part of parameters whose state is sharded over owners (``sharding: owners``).

    shares 2:1    owner 0   |  embedding[0:60]  |  layer 1  |          bytes follow the shares of free memory; a parameter larger
                  owner 1   |  embedding[60:90] | bias |               than an owner's share is cut along dimension 0

A parameter that is cut over split groups is kept by one such group, each device keeping the part that it holds.
The result depends on the plan and the shapes alone: the runtime, the estimate and checkpoints all use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from whale.ir.division import divide

ROWS = "dimension 0"
"""The axis that keepers divide: the parameter's first dimension, whatever logical axes that has."""


@dataclass(frozen=True, slots=True)
class SharedOut:
    """A parameter whose state is sharded over its owners."""

    name: str
    num_rows: int  # size of its first dimension; 1 where it may not be cut
    num_bytes: int  # of its state, over all keepers
    ways: tuple[Mapping[int, int], ...]  # sets of devices that together hold it once, each device with its number of elements

    def bytes_of(self, way: Mapping[int, int]) -> dict[int, float]:
        """Per device, the bytes of its part."""
        total = max(1, sum(way.values()))
        return {device: self.num_bytes * elements / total for device, elements in way.items()}

    @property
    def owners(self) -> tuple[int, ...]:
        """All devices that hold some of it."""
        return tuple(sorted({device for way in self.ways for device in way}))


@dataclass(frozen=True, slots=True)
class Keeping:
    """The keepers of a parameter, and the rows of each in order; `rows` is empty where each keeps what it holds."""

    devices: tuple[int, ...]
    rows: tuple[int, ...] = ()


def deal(parameters: Iterable[SharedOut], shares: Sequence[float]) -> dict[str, Keeping]:
    """Assigns parameters, the largest first, each to the keeper with the least load for its share (`shares`: a weight per device)."""
    ordered = sorted(parameters, key=lambda own: (len(own.ways) > 1, -own.num_bytes))  # first what has no choice
    totals: dict[tuple[int, ...], int] = {}
    for own in ordered:
        totals[own.owners] = totals.get(own.owners, 0) + own.num_bytes
    load, found = [0.0] * len(shares), {}
    for own in ordered:
        whole = sum(shares[device] for device in own.owners)
        wanted = {device: totals[own.owners] * shares[device] / whole for device in own.owners}
        room = [max(0.0, wanted[device] - load[device]) for device in own.owners]
        if len(own.ways) > 1 and own.num_rows > 1 and own.num_bytes > max(wanted.values()) and any(room):
            rows = divide(own.num_rows, room)
            kept: Mapping[int, int] = {device: count for device, count in zip(own.owners, rows, strict=True) if count}
            found[own.name] = Keeping(tuple(kept), tuple(kept.values()) if len(kept) > 1 else ())
        else:
            kept = min(own.ways, key=lambda way: max(_fill(own.bytes_of(way), load, shares)))
            found[own.name] = Keeping(tuple(kept))
        for device, num_bytes in own.bytes_of(kept).items():
            load[device] += num_bytes
    return found


def _fill(added: Mapping[int, float], load: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Load per share of each device after some bytes are added."""
    return [(load[device] + num_bytes) / shares[device] for device, num_bytes in added.items()]
