"""Gives the devices of an arrangement names, last of all: in every way that differs on few devices, by two rules on many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from whale.ir.cluster import Cluster, Device, Host
from whale.planning.pipeline.placement import Placed
from whale.search.arrangement import Arrangement, Group, Team
from whale.search.space.space import COMPLETE

Seats = tuple[tuple[Team, Placed], ...]
"""The replicas of an arrangement on their devices, in the order of the cluster's."""


def namings(arrangement: Arrangement, cluster: Cluster, *, near: bool | None = None) -> Iterator[Seats]:
    """The ways to seat an arrangement.

    Args:
        near: whether replicas fill hosts (True), or like devices are dealt out (False); None for both.
    """
    if len(cluster.devices) <= COMPLETE and near is None:
        found = _every_naming(arrangement, cluster)
    else:
        found = iter([_by_rule(arrangement, cluster, near=rule) for rule in (True, False) if near in (None, rule)])
    yield from dict.fromkeys(_in_order(seats, cluster) for seats in found)


def _in_order(seats: Seats, cluster: Cluster) -> Seats:
    number = {device.name: index for index, device in enumerate(cluster.devices)}
    return tuple(sorted(seats, key=lambda seat: min(number[name] for names in seat[1] for name in names)))


def _by_rule(arrangement: Arrangement, cluster: Cluster, *, near: bool) -> Seats:
    """Host by host, replica after replica (near), or rank after rank, so that those who hold the same stage are neighbours.

    Of a kind the cheapest devices come first.
    """
    free: dict[Device, list[str]] = {}
    for device in sorted(cluster.devices, key=cluster.price_share):
        free.setdefault(device.kind, []).append(device.name)
    seats: list[tuple[Team, Placed]] = []
    for team in arrangement.teams:
        groups: dict[Group, Iterator[tuple[str, ...]]] = {}
        for rank, number in sorted(team.numbers.items(), key=lambda each: -each[0].width):  # the widest first: they need most room
            found = _groups(free[rank.kind], cluster, rank.width, number * team.count)
            taken = {name for names in found for name in names}
            groups[rank], free[rank.kind] = iter(found), [name for name in free[rank.kind] if name not in taken]
        if near:
            placed = [tuple(next(groups[rank]) for rank in team.ranks) for _ in range(team.count)]
        else:
            ranks = [list(islice(groups[rank], team.count)) for rank in team.ranks]
            placed = list(zip(*ranks, strict=True))
        seats += [(team, replica) for replica in placed]
    return tuple(seats)


def _groups(names: Sequence[str], cluster: Cluster, width: int, number: int) -> list[tuple[str, ...]]:
    """So many groups of devices, each on one host as long as hosts have room for one."""
    by_host: dict[str, list[str]] = {}
    for name in names:
        by_host.setdefault(cluster.by_name[name].host, []).append(name)
    whole, rest = list[tuple[str, ...]](), list[str]()
    for own in by_host.values():
        stop = len(own) // width * width
        whole += [tuple(own[start : start + width]) for start in range(0, stop, width)]
        rest += own[stop:]
    across = [tuple(rest[start : start + width]) for start in range(0, len(rest) // width * width, width)]
    return (whole + across)[:number]


def _every_naming(arrangement: Arrangement, cluster: Cluster) -> Iterator[Seats]:
    """All assignments of devices to ranks, devices that stand for one another once."""
    slots = [rank.kind for team in arrangement.teams for _ in range(team.count) for rank in team.ranks for _ in range(rank.width)]
    looks = host_looks(cluster)

    def seated(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(names) == len(slots):
            yield names
            return
        for name in _distinct(slots[len(names)], frozenset(names), cluster, looks):
            yield from seated((*names, name))

    for names in seated(()):
        given = iter(names)
        seats: list[tuple[Team, Placed]] = []
        for team in arrangement.teams:
            for _ in range(team.count):
                seats.append((team, tuple(tuple(islice(given, rank.width)) for rank in team.ranks)))
        yield tuple(seats)


def host_looks(cluster: Cluster) -> Mapping[str, object]:
    """Per host, what is equal for hosts that stand for one another: what they have, where all are linked alike."""

    def look(host: Host) -> object:
        prices = tuple(device.price_per_hour for device in host.devices), host.price_per_hour
        return tuple(device.kind for device in host.devices), prices, host.link, host.card, host.name if cluster.pairs else ""

    return {host.name: look(host) for host in cluster.hosts}


def _distinct(kind: Device, taken: frozenset[str], cluster: Cluster, looks: Mapping[str, object]) -> Iterator[str]:
    """Free devices of a kind: one of each host and price, and of hosts that look alike one of those nobody has taken from."""
    fresh: set[object] = set()
    for host in cluster.hosts:
        is_fresh = all(device.name not in taken for device in host.devices)
        free = {device.price_per_hour: device.name for device in host.devices[::-1] if device.kind == kind and device.name not in taken}
        if free and not (is_fresh and looks[host.name] in fresh):
            yield from reversed(free.values())
            if is_fresh:
                fresh.add(looks[host.name])
