"""How fast replicas can sum gradients at most, on whichever devices and hosts they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.ir.cluster import Cluster, Device
from whale.search.arrangement import Team, sums_in_backward


@dataclass(frozen=True, slots=True)
class Summing:
    """How replicas sum gradients.

    Attributes:
        rate: seconds per byte that it takes at least.
        is_last: whether that begins when all else is done.
    """

    rate: float
    is_last: bool


@dataclass(eq=False)
class Sums:
    """The sums of any replicas on one cluster.

    Args:
        cluster: the devices.
    """

    cluster: Cluster
    _known: dict[tuple[Team, ...], Summing] = field(default_factory=dict, init=False)

    def of(self, teams: Sequence[Team]) -> Summing:
        """Of the replicas of these teams."""
        key = tuple(teams)
        if key not in self._known:
            rate = self._rate(sum(team.count for team in teams), self._num_hosts(teams))
            self._known[key] = Summing(rate, is_last=not sums_in_backward(teams))
        return self._known[key]

    @cached_property
    def _fastest(self) -> tuple[int, float, float]:
        """Devices of the largest host, and bytes per second of the fastest link inside a host, and of all unlike ones between hosts.

        A device has a side of its own for each of them.
        """
        cluster = self.cluster
        between = {cluster.network, *(link for _, link in cluster.pairs)}
        return (
            max(len(host.devices) for host in cluster.hosts),
            max((host.link.bandwidth for host in cluster.hosts if len(host.devices) > 1), default=0.0),
            sum(link.bandwidth for link in between if link is not None),
        )

    @cached_property
    def _host_kinds(self) -> Mapping[tuple[tuple[Device, int], ...], int]:
        """What hosts have of each kind, and how many have it."""
        return Counter(tuple(Counter(device.kind for device in host.devices).items()) for host in self.cluster.hosts)

    def _num_hosts(self, teams: Sequence[Team]) -> int:
        """Hosts on which the replicas of these teams are at least, if of each there is a device of one of its kinds on one of them."""
        wanted, found = sum(team.count for team in teams), 0
        rooms = {own: sum(min(team.count, sum(n for kind, n in own if kind in team.taken)) for team in teams) for own in self._host_kinds}
        for own, room in sorted(rooms.items(), key=lambda each: -each[1]):
            if wanted <= 0 or not room:
                break
            number = min(self._host_kinds[own], -(-wanted // room))
            wanted, found = wanted - number * room, found + number
        return found

    def _rate(self, num_owners: int, num_hosts: int) -> float:
        """Seconds per byte of a gradient that so many devices on so many hosts add up at least, in whatever way they do.

        A device of k moves 2 (k - 1) / k of the bytes over its links, over all of them at once; a host of H likewise, over those of all
        its devices.
        """
        if num_owners == 1:
            return 0.0
        largest, inside, outside = self._fastest
        rate = 2 * (num_owners - 1) / num_owners / (inside + outside)
        rate = max(rate, 2 * (num_hosts - 1) / num_hosts / (largest * outside) if num_hosts > 1 else 0.0)
        return float(f"{0.995 * rate:.2e}")  # rounded down, so that alike arrangements share what is worked out
