"""The links that an arrangement would have between its devices, whether its replicas fill hosts or like devices are dealt out to them.

near    replica after replica takes the next devices of its kinds: messages stay inside hosts, sums of gradients cross them
far     rank after rank: those who hold the same stage are neighbours, and messages cross
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from whale.estimate import all_reduce_seconds
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device, Link
from whale.search.arrangement import Group, Team

SAMPLE = 64
"""Sums over more devices cost about as much per byte as over so many."""

SUMMED = 2**26
"""Sums are priced for about so many bytes."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a way takes.

    Attributes:
        latency: seconds.
        per_byte: seconds of a byte that goes it once.
        narrowest: of a byte that all send at once, on the part that is busiest.
    """

    latency: float
    per_byte: float
    narrowest: float


@dataclass(eq=False)
class Ties:
    """The links of arrangements on one cluster.

    Attributes:
        prices: know the links.
    """

    prices: Prices
    _borders: dict[tuple[Team, bool], Way] = field(default_factory=dict, init=False)
    _insides: dict[Group, Way] = field(default_factory=dict, init=False)
    _sums: dict[tuple[tuple[Team, ...], Team, bool], tuple[float, ...]] = field(default_factory=dict, init=False)
    _owned: dict[tuple[Team, bool, tuple[int, ...]], NDArray[np.int64]] = field(default_factory=dict, init=False)
    _known: dict[bytes, float] = field(default_factory=dict, init=False)
    _spread: dict[tuple[int, int, frozenset[tuple[int, int]]], float] = field(default_factory=dict, init=False)

    def borders(self, team: Team, *, near: bool) -> Way:
        """The way of a micro-batch from rank to rank of the first replica."""
        key = team.one if near else team, near
        if key not in self._borders:
            self.find_borders((team,), near=near)
        return self._borders[key]

    def find_borders(self, teams: Iterable[Team], *, near: bool) -> None:
        """Finds `borders` of many teams at once, of several ranks each."""
        asked = dict.fromkeys(team.one if near else team for team in teams)
        new = [team for team in asked if (team, near) not in self._borders]
        if not new:
            return
        owners = np.concatenate([self._numbers[0][self._firsts(team, {}, near=near)] for team in new])
        of = np.repeat(np.arange(len(new)), [team.num_ranks for team in new])
        steps = np.flatnonzero(of[1:] == of[:-1])
        hosts, looks = (each[owners] for each in self._hosts)
        number, devices = len(self.prices.cluster.hosts), self.prices.cluster.devices
        ends_alike = looks[steps] * number + looks[steps + 1]
        alike = (hosts[steps] == hosts[steps + 1]) * number**2 + ends_alike  # of equal ones the links are equal
        _, firsts, kinds = np.unique(alike, return_index=True, return_inverse=True)
        pairs = [(devices[owners[step]].name, devices[owners[step + 1]].name) for step in steps[firsts].tolist()]
        links = [(self.prices.link(a, b), self._sharing(a, self.prices.link(a, b))) for a, b in pairs]
        ends = np.searchsorted(of[steps], np.arange(len(new)))
        latency, per_byte = (
            np.bincount(of[steps], np.array(own)[kinds], len(new)).tolist()
            for own in ([link.latency for link, _ in links], [1 / link.bandwidth for link, _ in links])
        )
        shares = np.minimum.reduceat(np.array([link.bandwidth / sharing for link, sharing in links])[kinds], ends).tolist()
        ways = (Way(first, second, 1 / share) for first, second, share in zip(latency, per_byte, shares, strict=True))
        self._borders.update(zip(((team, near) for team in new), ways, strict=True))

    def inside(self, group: Group) -> Way:
        """The link between the devices of a split group."""
        if group not in self._insides:
            a, b = self._beside(group)
            link = self.prices.link(a, b)
            per_byte = self._sharing(a, link) / link.bandwidth
            self._insides[group] = Way(link.latency, per_byte, per_byte)
        return self._insides[group]

    def sum_rates(self, teams: Sequence[Team], own: Team, *, near: bool) -> tuple[float, ...]:
        """Seconds per byte of a gradient that all replicas of these teams add up, per rank of one of them.

        The others have its stage as far along their pipelines. Ranks of like devices may be on unlike hosts.
        """
        key = tuple(teams), own, near
        if key not in self._sums:
            parts, taken = list[NDArray[np.int64]](), Counter[Device]()
            for team in teams:
                places = np.arange(own.num_ranks) * team.num_ranks // own.num_ranks
                parts.append(self._owners(team, taken, near=near)[places])
                taken.update(team.taken)
            self._sums[key] = self._rates(np.concatenate(parts, axis=1))
        return self._sums[key]

    def ends_rate(self, team: Team, *, near: bool) -> float:
        """Seconds per byte of a gradient that the first and the last ranks of all replicas of a team add up."""
        return self._rates(self._owners(team, {}, near=near)[[0, -1]].reshape(1, -1))[0]

    def _owners(self, team: Team, taken: Mapping[Device, int], *, near: bool) -> NDArray[np.int64]:
        """The devices of each rank, one of each replica, by number: ``[ranks, replicas]``, of many replicas some.

        Args:
            taken: devices of each kind that other teams have.
        """
        key = team, near, tuple(taken.get(kind, 0) for kind in team.taken)
        if key not in self._owned:
            self._owned[key] = self._found_owners(team, taken, near=near)
        return self._owned[key]

    def _found_owners(self, team: Team, taken: Mapping[Device, int], *, near: bool) -> NDArray[np.int64]:
        strides = [team.one.taken[rank.kind] if near else rank.width for rank in team.ranks]
        places = self._firsts(team, taken, near=near)[:, None] + np.array(strides)[:, None] * np.arange(min(team.count, SAMPLE))
        found: NDArray[np.int64] = self._numbers[0][places]
        return found

    def _firsts(self, team: Team, taken: Mapping[Device, int], *, near: bool) -> NDArray[np.int64]:
        """The devices of the first replica, by their place among all."""
        used, firsts = Counter(taken), list[NDArray[np.int64]]()
        for rank, number in team.runs:
            step = rank.width * (1 if near else team.count)
            start = self._numbers[1][rank.kind] + used[rank.kind]
            firsts.append(np.arange(start, start + step * number, step))
            used[rank.kind] += step * number
        return np.concatenate(firsts)

    def _rates(self, owners: NDArray[np.int64]) -> tuple[float, ...]:
        """Seconds per byte of a sum of each row of devices; of rows that are spread over like hosts in the same way found once."""
        hosts, looks = (each[owners] for each in self._hosts)
        spread = ((hosts - hosts[:, :1]) * len(self.prices.cluster.hosts) + looks).tobytes()
        size, found = len(spread) // len(owners), list[float]()
        for row in range(len(owners)):
            key = spread[row * size : (row + 1) * size]
            if key not in self._known:
                self._known[key] = self._rate(owners[row], hosts[row], looks[row])
            found.append(self._known[key])
        return tuple(found)

    def _rate(self, owners: NDArray[np.int64], hosts: NDArray[np.int64], looks: NDArray[np.int64]) -> float:
        counts = Counter(zip(hosts.tolist(), looks.tolist(), strict=True))
        key = len(owners), len(counts), frozenset((look, count) for (_, look), count in counts.items())
        if key not in self._spread:
            names = [self.prices.cluster.devices[number].name for number in owners.tolist()]
            self._spread[key] = all_reduce_seconds(self.prices.cluster, names, SUMMED) / SUMMED if len(names) > 1 else 0.0
        return self._spread[key]

    @cached_property
    def _numbers(self) -> tuple[NDArray[np.int64], Mapping[Device, int]]:
        """All devices by number, kind after kind, and where each kind begins."""
        of_kind: dict[Device, list[int]] = {}
        for number, device in enumerate(self.prices.cluster.devices):
            of_kind.setdefault(device.kind, []).append(number)
        ends = accumulate(map(len, of_kind.values()), initial=0)
        return np.concatenate([np.array(own) for own in of_kind.values()]), dict(zip(of_kind, ends, strict=False))

    @cached_property
    def _hosts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Per device the number of its host, and one that hosts share which sum alike: where some are linked in their own way none do."""
        cluster, alike = self.prices.cluster, dict[object, int]()
        hosts, looks = list[int](), list[int]()
        for number, host in enumerate(cluster.hosts):
            own = host.name if cluster.pairs else (host.link, cluster.card(host.name), len(host.devices))
            look = alike.setdefault(own, len(alike))
            hosts += [number] * len(host.devices)
            looks += [look] * len(host.devices)
        return np.array(hosts), np.array(looks)

    def _beside(self, group: Group) -> tuple[str, str]:
        """Two devices of the first host that has room for a split group."""
        own = ([device.name for device in host.devices if device.kind == group.kind] for host in self.prices.cluster.hosts)
        first, second, *_ = next(names for names in own if len(names) >= group.width)
        return first, second

    def _sharing(self, name: str, link: Link) -> int:
        """How many devices share a link inside a host."""
        cluster = self.prices.cluster
        return len(cluster.host_by_name[cluster.by_name[name].host].devices) if link.shared else 1
