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


@dataclass(eq=False)
class Ties:
    """The links of arrangements on one cluster.

    Attributes:
        prices: know the links.
    """

    prices: Prices
    _borders: dict[tuple[Team, bool], Way] = field(default_factory=dict, init=False)
    _insides: dict[Group, Way] = field(default_factory=dict, init=False)
    _rates: dict[tuple[tuple[Team, ...], bool], float] = field(default_factory=dict, init=False)
    _rates_of: dict[tuple[str, ...], float] = field(default_factory=dict, init=False)

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

    def sum_rate(self, teams: Sequence[Team], *, near: bool) -> float:
        """Seconds per byte of a gradient that all replicas of these teams add up."""
        if sum(team.count for team in teams) == 1:
            return 0.0
        key = tuple(teams), near
        if key not in self._rates:
            taken: Counter[Device] = Counter()
            names: list[str] = []
            for team in teams:
                kind, count = team.ranks[0].kind, min(team.count, SAMPLE)
                stride = team.one.taken[kind] if near else team.ranks[0].width
                names += self._names[kind][taken[kind] :: stride][:count]
                taken[kind] += stride * count
            self._rates[key] = self._rate_of(tuple(names))
        return self._rates[key]

    def _rate_of(self, names: tuple[str, ...]) -> float:
        """`sum_rate` of these devices, which many teams share."""
        if names not in self._rates_of:
            self._rates_of[names] = all_reduce_seconds(self.prices.cluster, names, SUMMED) / SUMMED if len(names) > 1 else 0.0
        return self._rates_of[names]

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
