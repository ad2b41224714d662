"""The links that an arrangement would have between its devices, whether its replicas fill hosts or like devices are dealt out to them.

near    replica after replica takes the next devices of its kinds: messages stay inside hosts, sums of gradients cross them
far     rank after rank: those who hold the same stage are neighbours, and messages cross
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

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


@dataclass(frozen=True, slots=True)
class Owners:
    """The devices of a team that have one stage, one of each replica.

    Attributes:
        kind: theirs.
        count: how many there are.
        stride: from one to the next among the devices of their kind.
    """

    kind: Device
    count: int
    stride: int


@dataclass(eq=False)
class Ties:
    """The links of arrangements on one cluster.

    Attributes:
        prices: know the links.
    """

    prices: Prices
    _borders: dict[tuple[Team, bool], Way] = field(default_factory=dict, init=False)
    _insides: dict[Group, Way] = field(default_factory=dict, init=False)
    _rates: dict[tuple[Owners, ...], float] = field(default_factory=dict, init=False)

    @cached_property
    def _names(self) -> Mapping[Device, tuple[str, ...]]:
        """Devices of each kind."""
        found: dict[Device, list[str]] = {}
        for device in self.prices.cluster.devices:
            found.setdefault(device.kind, []).append(device.name)
        return {kind: tuple(names) for kind, names in found.items()}

    def borders(self, team: Team, *, near: bool) -> Way:
        """The way of a micro-batch from rank to rank of the first replica."""
        key = team.one if near else team, near
        if key not in self._borders:
            firsts = self._firsts(team, near=near)
            links = [self.prices.link(a, b) for a, b in pairwise(firsts)]
            shares = [link.bandwidth / self._sharing(a, link) for (a, _), link in zip(pairwise(firsts), links, strict=True)]
            way = Way(sum(link.latency for link in links), sum(1 / link.bandwidth for link in links), 1 / min(shares))
            self._borders[key] = way
        return self._borders[key]

    def inside(self, group: Group) -> Way:
        """The link between the devices of a split group."""
        if group not in self._insides:
            a, b = self._beside(group)
            link = self.prices.link(a, b)
            per_byte = self._sharing(a, link) / link.bandwidth
            self._insides[group] = Way(link.latency, per_byte, per_byte)
        return self._insides[group]

    def sum_rates(self, teams: Sequence[Team], own: Team, *, near: bool) -> Mapping[Group, float]:
        """Seconds per byte of a gradient that all replicas of these teams add up, by the devices that have its stage in one of them.

        The others have it as far along their pipelines as that one the first rank of such devices.
        """
        if sum(team.count for team in teams) == 1:
            return dict.fromkeys(own.numbers, 0.0)
        places, start = dict[Group, int](), 0
        for rank, number in own.runs:
            places.setdefault(rank, start)
            start += number
        return {rank: self._sum_rate(teams, place, own.num_ranks, near=near) for rank, place in places.items()}

    def _sum_rate(self, teams: Sequence[Team], place: int, num_ranks: int, *, near: bool) -> float:
        """Of the stage of one of so many ranks."""
        ranks = (team.ranks[place * team.num_ranks // num_ranks] for team in teams)
        return self._rate(tuple(_owners(team, rank, near=near) for rank, team in zip(ranks, teams, strict=True)))

    def ends_rate(self, team: Team, *, near: bool) -> float:
        """Seconds per byte of a gradient that the first and the last ranks of all replicas of a team add up."""
        return self._rate(tuple(_owners(team, rank, near=near) for rank in (team.ranks[0], team.ranks[-1])))

    def _rate(self, owners: tuple[Owners, ...]) -> float:
        if owners not in self._rates:
            taken: Counter[Device] = Counter()
            names: list[str] = []
            for own in owners:
                names += self._names[own.kind][taken[own.kind] :: own.stride][: own.count]
                taken[own.kind] += own.stride * own.count
            self._rates[owners] = all_reduce_seconds(self.prices.cluster, names, SUMMED) / SUMMED if len(names) > 1 else 0.0
        return self._rates[owners]

    def _beside(self, group: Group) -> tuple[str, str]:
        """Two devices of the first host that has room for a split group."""
        own = ([device.name for device in host.devices if device.kind == group.kind] for host in self.prices.cluster.hosts)
        first, second, *_ = next(names for names in own if len(names) >= group.width)
        return first, second

    def _firsts(self, team: Team, *, near: bool) -> list[str]:
        """The first device of each rank of the first replica."""
        taken: Counter[Device] = Counter()
        found: list[str] = []
        for rank, number in team.runs:
            step = rank.width * (1 if near else team.count)
            found += self._names[rank.kind][taken[rank.kind] : taken[rank.kind] + number * step : step]
            taken[rank.kind] += number * step
        return found

    def _sharing(self, name: str, link: Link) -> int:
        """How many devices share a link inside a host."""
        cluster = self.prices.cluster
        return len(cluster.host_by_name[cluster.by_name[name].host].devices) if link.shared else 1


def _owners(team: Team, rank: Group, *, near: bool) -> Owners:
    return Owners(rank.kind, min(team.count, SAMPLE), team.one.taken[rank.kind] if near else rank.width)
