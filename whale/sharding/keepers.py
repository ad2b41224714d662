"""Keepers: which owner keeps which part of parameters whose state is sharded over owners (``sharding: owners``).

    shares 2:1    owner 0   |  embedding[0:60]  |  layer 1  |          bytes follow the shares of free memory; a parameter larger
                  owner 1   |  embedding[60:90] | bias |               than an owner's share is cut along dimension 0

A parameter that is cut over split groups is kept by one such group, each device keeping the part that it holds.
The result depends on the plan and the shapes alone: the runtime, the estimate and checkpoints all use it.

Groups of devices, such as those of a host, may each keep a whole copy; then each group assigns its own:

    host a     owner 0   |  embedding[0:60]  |  layer 1  |          gradients are summed inside each group, and then
               owner 1   |  embedding[60:90] | bias |               between the keepers of equal elements; weights
    host b     owner 2   |  embedding | bias | layer 1   |          never leave their group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whale.ir.division import divide
from whale.ir.plan import Plan, devices_of

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


def keeper_groups(plan: Plan, hosts: Sequence[str]) -> tuple[int, ...]:
    """Per rank, the number of its host among those of the plan; hosts that a split group connects count as one.

    Empty where all are one, or no parameter lies on two. `hosts`: of each rank. A parameter may lie in parts in a split group, so a
    copy of it does not fit on less.
    """
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    found = connected(hosts, _hosts(plan, hosts, (group for stage in stages for group in stage.groups)))
    met: dict[int, tuple[tuple[str, ...], set[int]]] = {}  # equal replicas share their lists of parameters, which are long
    for stage in stages:
        own = met.setdefault(id(stage.parameters), (stage.parameters, set()))[1]
        own.update(found[plan.rank_of[device]] for device in stage.virtual_device.devices)
    holders: dict[str, set[int]] = {}
    for names, own in met.values():
        for name in names:
            holders.setdefault(name, set()).update(own)
    return found if any(len(own) > 1 for own in holders.values()) else ()


def sync_groups(plan: Plan, hosts: Sequence[str]) -> tuple[int, ...]:
    """Per rank, the number of its host among those of the plan; hosts that a replica connects count as one. Empty where all are one."""
    found = connected(hosts, _hosts(plan, hosts, (devices_of([replica]) for replica in plan.replicas)))
    return found if len(set(found)) > 1 else ()


def _hosts(plan: Plan, hosts: Sequence[str], sets: Iterable[Sequence[str]]) -> set[tuple[str, ...]]:
    return {tuple(hosts[plan.rank_of[device]] for device in own) for own in sets}


def connected(hosts: Sequence[str], sets: Iterable[Collection[str]]) -> tuple[int, ...]:
    """Per device on these hosts, the number of its host; hosts in one of the sets count as one."""
    joined = {host: host for host in hosts}

    def first(host: str) -> str:
        while joined[host] != host:
            host = joined[host]
        return host

    for own in sets:
        one = next(iter(own))
        for host in own:
            joined[first(host)] = first(one)
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(first(host), len(numbers)) for host in hosts)


def deal_by_group(
    parameters: Iterable[SharedOut], shares: Sequence[float], groups: Sequence[Sequence[int]]
) -> dict[str, tuple[Keeping, ...]]:
    """Per parameter, the keepers of each group that holds some of it; without groups, of all devices."""
    if not groups:
        return {name: (keeping,) for name, keeping in deal(parameters, shares).items()}
    shared = [*parameters]
    dealt: dict[object, dict[str, Keeping]] = {}  # of equal groups, of which there may be many
    same: dict[object, Ways] = {}  # equal ways of all groups, each once
    found: dict[str, list[Keeping]] = {}
    for group in groups:
        number, ways = {device: index for index, device in enumerate(group)}, dict[int, Ways]()
        for own in shared:
            if id(own.ways) not in ways:
                sets = ({number[device]: count for device, count in way.items() if device in number} for way in own.ways)
                inside = tuple(way for way in sets if way)
                ways[id(own.ways)] = same.setdefault(tuple(tuple(way.items()) for way in inside), inside)
        weights = tuple(shares[device] for device in group)
        look = weights, tuple(id(ways[id(own.ways)]) for own in shared)
        if look not in dealt:
            dealt[look] = deal([replace(own, ways=ways[id(own.ways)]) for own in shared if ways[id(own.ways)]], weights)
        for name, keeping in dealt[look].items():
            found.setdefault(name, []).append(Keeping(tuple(group[device] for device in keeping.devices), keeping.rows))
    return {name: tuple(copies) for name, copies in found.items()}


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
