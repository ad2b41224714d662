"""Which devices a strategy has, and the links between them: named ones, or by one of two rules.

near    replica after replica takes the next devices of its types: messages stay inside hosts, gradient sums cross them
far     rank after rank: holders of the same stage are neighbours, and messages cross hosts
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.estimate import Line, all_reduce_line
from whale.estimate.costs.line import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.planning.strategy import Placed, RankSpec, ReplicaSpec, Strategy
from whale.sharding.keepers import connected

Numbers = NDArray[np.int64]

_Taken = tuple[tuple[int, int], ...]
"""(width, number) of the groups of a device type that are already taken."""


@dataclass(frozen=True, slots=True)
class Hops:
    """Transfer of a micro-batch from each rank to the next, the slowest over all replicas."""

    latency: Floats  # seconds
    per_byte: Floats  # seconds per byte of a single transfer
    crowded: Floats  # seconds per byte where all devices that share the link send at once


@dataclass(eq=False)
class Places:
    """The devices of strategies on one cluster."""

    prices: Prices
    _groups: dict[tuple[Device, int, int, _Taken], tuple[Numbers, tuple[int, ...]]] = field(default_factory=dict, init=False)
    _rates: dict[tuple[int, int, frozenset[tuple[int, int]]], Line] = field(default_factory=dict, init=False)
    _known: dict[bytes, Line] = field(default_factory=dict, init=False)
    _local: dict[tuple[tuple[int, ...], tuple[int, ...]], Line] = field(default_factory=dict, init=False)

    def firsts(self, strategy: Strategy) -> list[Numbers]:
        """Per replica specification, the index of the first device of each rank of each replica: ``[replicas, ranks]``."""
        if strategy.replicas[0].names is not None:
            return [np.array([[self._number[names[0]] for names in replica.names or ()]]) for replica in strategy.replicas]
        return [np.stack([rank[:, 0] for rank in ranks], axis=1) for ranks in self._placed(strategy)]

    def of_first(self, strategy: Strategy) -> list[Placed]:
        """Per replica specification, the devices of each rank of its first replica."""
        if strategy.replicas[0].names is not None:
            return [replica.names or () for replica in strategy.replicas]
        devices = self.prices.cluster.devices
        return [tuple(tuple(devices[number].name for number in rank[0].tolist()) for rank in ranks) for ranks in self._placed(strategy)]

    def named(self, strategy: Strategy) -> Strategy:
        """The strategy with all devices named; replicas in the order of the cluster's devices."""
        if strategy.is_open or strategy.replicas[0].names is not None:
            return strategy
        names = [device.name for device in self.prices.cluster.devices]
        found = list[tuple[int, ReplicaSpec]]()
        for replica, ranks in zip(strategy.replicas, self._placed(strategy), strict=True):
            rows = [rank.tolist() for rank in ranks]
            for copy in range(replica.count):
                own = tuple(tuple(names[number] for number in rank[copy]) for rank in rows)
                found.append((min(rank[copy][0] for rank in rows), replace(replica, count=1, names=own)))
        return replace(strategy, replicas=tuple(replica for _, replica in sorted(found, key=lambda each: each[0])))

    def _placed(self, strategy: Strategy) -> list[list[Numbers]]:
        """Per replica specification and rank, the devices of its groups: ``[replicas, devices]``."""
        taken: dict[Device, _Taken] = {}
        placed = []
        for replica in strategy.replicas:
            ranks, places = replica.ranks or (), list[Numbers]()
            groups: dict[RankSpec, Numbers] = {}
            for rank, number in sorted(replica.numbers.items(), key=lambda each: -each[0].width):  # the widest need most room
                before = taken.get(rank.kind, ())
                groups[rank] = self._take(rank, number * replica.count, before)[0]
                taken[rank.kind] = (*before, (rank.width, number * replica.count))
            used = dict.fromkeys(groups, 0)
            for rank in ranks:
                step, place = (replica.numbers[rank], used[rank]) if strategy.near else (1, used[rank] * replica.count)
                places.append(groups[rank][place : place + step * (replica.count - 1) + 1 : step])
                used[rank] += 1
            placed.append(places)
        return placed

    def _take(self, rank: RankSpec, number: int, before: _Taken) -> tuple[Numbers, tuple[int, ...]]:
        """Groups of devices, each on one host as long as hosts have room for one, and the devices that are left."""
        key = rank.kind, rank.width, number, before
        if key not in self._groups:
            free = self._of_kind[rank.kind]
            if before:
                width, count = before[-1]
                free = self._take(RankSpec(rank.kind, width), count, before[:-1])[1]
            by_host: dict[str, list[int]] = {}
            for device in free:
                by_host.setdefault(self.prices.cluster.devices[device].host, []).append(device)
            whole, rest = list[list[int]](), list[int]()
            for own in by_host.values():
                stop = len(own) // rank.width * rank.width
                whole += [own[start : start + rank.width] for start in range(0, stop, rank.width)]
                rest += own[stop:]
            whole += [rest[start : start + rank.width] for start in range(0, len(rest) // rank.width * rank.width, rank.width)]
            used = {device for own in whole[:number] for device in own}
            self._groups[key] = np.array(whole[:number]), tuple(device for device in free if device not in used)
        return self._groups[key]

    def num_looks(self, strategy: Strategy) -> int:
        """How many replicas differ in how their ranks lie on hosts; identical ones are simulated as one."""
        found = 0
        for own in self.firsts(strategy):
            hosts = self._host[own]
            ways = np.concatenate((hosts[:, 1:] == hosts[:, :-1], self._look[hosts]), axis=1)
            found += len(np.unique(ways, axis=0))
        return found

    def hops(self, firsts: Numbers) -> Hops:
        """The hops between ranks of some replicas, the last from the last rank to the first."""
        a, b = firsts, np.roll(firsts, -1, axis=1)
        hosts = self._host[a], self._host[b]
        if self.prices.cluster.pairs:
            devices = self.prices.cluster.devices
            links = [
                [self.prices.link(devices[x].name, devices[y].name) for x, y in zip(*row, strict=True)] for row in zip(a, b, strict=True)
            ]
            between = np.array([[(link.latency, 1 / link.bandwidth) for link in row] for row in links]).reshape(*a.shape, 2)
        else:
            network = self.prices.cluster.network
            own = (network.latency, 1 / network.bandwidth) if network else (0.0, 0.0)
            between = np.broadcast_to(np.array(own), (*a.shape, 2))
        inside, same = self._inside[hosts[0]], hosts[0] == hosts[1]
        latency, per_byte = (np.where(same, inside[..., place], between[..., place]).max(axis=0) for place in (0, 1))
        crowded = np.where(same, inside[..., 2], between[..., 1]).max(axis=0)
        return Hops(latency, per_byte, crowded)

    def slowest(self, firsts: Numbers, replica: ReplicaSpec) -> list[str | None]:
        """Per rank, the host with the slowest link that holds it; None for a rank that is not split."""
        hosts = self._host[firsts]
        slow = np.take_along_axis(hosts, self._inside[hosts, 2].argmax(axis=0)[None, :], axis=0)[0].tolist()
        names = self.prices.cluster.hosts
        return [names[host].name if rank.width > 1 else None for host, rank in zip(slow, replica.ranks or (), strict=True)]

    def sums(self, firsts: Sequence[Numbers]) -> list[list[Line]]:
        """Per replica specification and rank, seconds of a gradient bucket's all-reduce by bytes, over all holders of the same stages."""
        return [self._all(self._owners(own, firsts), firsts) for own in firsts]

    def alone(self, firsts: Sequence[Numbers]) -> list[float]:
        """Per replica specification, the largest share of a rank's state per owner that only one host holds."""
        owners = [self._owners(own, firsts) for own in firsts]
        if self.prices.costs.zero:
            return [1 / each.shape[1] for each in owners]
        return [float((self._host[each] == self._host[each[:, :1]]).all(axis=1).any()) / each.shape[1] for each in owners]

    def between(self, replicas: Sequence[ReplicaSpec], firsts: Sequence[Numbers]) -> float:
        """Bytes per second of a device to other hosts where all devices send: of the slowest link or share of a used host's card."""
        used = np.zeros(len(self.prices.cluster.hosts), dtype=np.int64)
        for replica, own in zip(replicas, firsts, strict=True):
            for rank, devices in zip(replica.ranks or (), own.T, strict=True):
                used += rank.width * np.bincount(self._host[devices], minlength=len(used))
        return min(self._slowest, float(np.min(self._cards / np.maximum(used, 1), where=used > 0, initial=math.inf)))

    @cached_property
    def _slowest(self) -> float:
        """Bytes per second of the slowest link between hosts."""
        cluster = self.prices.cluster
        links = [link for _, link in cluster.pairs] + ([cluster.network] if cluster.network else [])
        return min((link.bandwidth for link in links), default=math.inf)

    @cached_property
    def _cards(self) -> Floats:
        """Bytes per second of each host's card."""
        return np.array([math.inf if host.card is None else host.card for host in self.prices.cluster.hosts])

    @staticmethod
    def _owners(own: Numbers, firsts: Sequence[Numbers]) -> Numbers:
        """The devices that hold each rank's stages, ``[ranks, owners]``; in replicas of other depths at the same relative position."""
        ranks = np.arange(own.shape[1])
        return np.concatenate([each[:, ranks * each.shape[1] // len(ranks)] for each in firsts], axis=0).T

    def ends(self, firsts: Sequence[Numbers]) -> Line:
        """The same for parameters that the first and the last rank of all replicas hold."""
        return self._all(np.unique(np.concatenate([own[:, [0, -1]].reshape(-1) for own in firsts])).reshape(1, -1), firsts)[0]

    def _all(self, owners: Numbers, firsts: Sequence[Numbers]) -> list[Line]:
        hosts = self._host[owners]
        if self.prices.costs.rounds is not None and len(set(groups := self._together(firsts))) > 1:
            return [self._apart(*each) for each in zip(owners.tolist(), (np.array(groups)[row].tolist() for row in hosts), strict=True)]
        spread = ((hosts - hosts[:, :1]) * len(self.prices.cluster.hosts) + self._look[hosts]).tobytes()
        size, found = len(spread) // len(owners), list[Line]()
        for row in range(len(owners)):
            key = spread[row * size : (row + 1) * size]
            if key not in self._known:
                self._known[key] = self._rate(owners[row], hosts[row])
            found.append(self._known[key])
        return found

    def _rate(self, owners: Numbers, hosts: Numbers) -> Line:
        counts = Counter(hosts.tolist())
        key = len(owners), len(counts), frozenset((int(self._look[host]), count) for host, count in counts.items())
        if key not in self._rates:
            names = [self.prices.cluster.devices[number].name for number in owners.tolist()]
            self._rates[key] = self._sum(names)
        return self._rates[key]

    def _together(self, firsts: Sequence[Numbers]) -> tuple[int, ...]:
        """Per host of the cluster, the number of the group that steps together; hosts that take no part are in one with some that does."""
        names = [host.name for host in self.prices.cluster.hosts]
        sets = {tuple(names[host] for host in row) for own in firsts for row in self._host[own].tolist()}
        groups, used = connected(names, sets), {name for each in sets for name in each}
        return tuple(group if name in used else groups[names.index(min(used))] for name, group in zip(names, groups, strict=True))

    def _apart(self, owners: Sequence[int], groups: Sequence[int]) -> Line:
        """Sums inside each group that steps on its own, and in some steps an average of weights and optimizer state over all."""
        key = tuple(owners), tuple(groups)
        if key not in self._local:
            names = [self.prices.cluster.devices[number].name for number in owners]
            inside = [self._sum([name for name, own in zip(names, groups, strict=True) if own == group]) for group in set(groups)]
            between = self._sum(names) * self.prices.costs.averaged_share if len(inside) > 1 else Line()
            self._local[key] = Line.largest(inside) + between
        return self._local[key]

    def _sum(self, names: Sequence[str]) -> Line:
        costs = self.prices.costs
        if len(names) < 2:
            return Line()
        return all_reduce_line(self.prices.cluster, names, Line(0.0, self.prices.sent_share), 1, float(costs.bucket_bytes))

    @cached_property
    def _number(self) -> dict[str, int]:
        return {device.name: number for number, device in enumerate(self.prices.cluster.devices)}

    @cached_property
    def _of_kind(self) -> dict[Device, tuple[int, ...]]:
        """The devices of each type, the cheapest first."""
        found: dict[Device, list[int]] = {}
        cluster = self.prices.cluster
        for number in sorted(range(len(cluster.devices)), key=lambda number: cluster.price_share(cluster.devices[number])):
            found.setdefault(cluster.devices[number].kind, []).append(number)
        return {kind: tuple(numbers) for kind, numbers in found.items()}

    @cached_property
    def _host(self) -> Numbers:
        """Per device, the index of its host."""
        return np.repeat(np.arange(len(self.prices.cluster.hosts)), [len(host.devices) for host in self.prices.cluster.hosts])

    @cached_property
    def _inside(self) -> Floats:
        """Per host: latency, seconds per byte of its link, and seconds per byte where all its devices send: ``[hosts, 3]``."""
        found = [
            (host.link.latency, 1 / host.link.bandwidth, (len(host.devices) if host.link.shared else 1) / host.link.bandwidth)
            for host in self.prices.cluster.hosts
        ]
        return np.array(found)

    @cached_property
    def _look(self) -> Numbers:
        """Per host a number that is equal for hosts with equal all-reduce times; unique where host pairs have own links."""
        cluster, alike = self.prices.cluster, dict[object, int]()
        looks = [host.name if cluster.pairs else (host.link, cluster.card(host.name), len(host.devices)) for host in cluster.hosts]
        return np.array([alike.setdefault(look, len(alike)) for look in looks])
