"""Clusters from each rank's own device, and subsets of clusters by names such as ``V100:2,host1/*``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from whale.config import did_you_mean
from whale.errors import ClusterError, WhaleError, raise_faults
from whale.hardware.catalogue import catalogue, usual_host_link
from whale.ir.cluster import Cluster, Device, Host, Link

NAME = "this machine"
_HINT = "describe the devices in a cluster file, as `whale probe` measures them"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One rank's device, as found on its host."""

    host: str  # the host's name
    model: str  # catalogue name, or the device's own name if the catalogue has none
    memory: int  # bytes that this rank may use
    num_cores: float = 1.0  # a CPU rank's share of the host's cores, or this rank's part of a shared GPU; may be less than one
    flops: tuple[tuple[str, float], ...] = ()  # peak FLOP/s per dtype, sorted pairs; empty for the catalogue's
    bandwidth: float = 0.0  # bytes per second of the device's memory; 0 for the catalogue's
    efficiency: float = 0.0  # share of the peak that large matrix products reach; 0 for the catalogue's
    link: Link | None = None  # to the host's other devices; None for the catalogue's
    sharers: int = 1  # ranks of which each has a part of the GPU

    def device(self, name: str) -> Device:
        """The device under a name. Raises ClusterError: neither the catalogue nor the profile describes the model."""
        known = catalogue().devices.get(self.model)
        if known is not None:
            return replace(known.device(name, self.host, memory=self.memory, num_cores=self.num_cores), sharers=self.sharers)
        if "float32" not in dict(self.flops) or self.bandwidth <= 0 or self.efficiency <= 0:
            raise ClusterError(
                f"unknown device model {self.model!r} on {self.host}",
                hint=_HINT,
            )
        reached, link = (self.bandwidth, self.efficiency), usual_host_link(self.model)
        return Device(name, self.host, self.model, self.flops, self.memory, *reached, host_link=link, sharers=self.sharers)

    @property
    def inner_link(self) -> Link:
        """The link to the host's other devices. Raises ClusterError: neither the profile nor the catalogue has one."""
        found = self.link or catalogue().usual_link({self.model})
        if found is None:
            raise ClusterError(
                f"no link is known for device model {self.model!r} on {self.host}",
                hint=_HINT,
            )
        return found


def make_cluster(profiles: Sequence[DeviceProfile], network: Link | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of the ranks' devices, and each rank's device name.

    Hosts are in order of their first rank, devices of a host in order of rank (``HOST/0``, ``HOST/1`` ...); the ranks of a host need not be
    consecutive. A host with different devices has the slowest of their links.

    Args:
        profiles: by rank.
        network: the link between hosts; None for the catalogue's.

    Raises:
        ClusterError: no profiles, or one that does not describe its device.
    """
    if not profiles:
        raise ClusterError("the cluster has no device: no rank has one")
    names: list[str] = []
    members: dict[str, list[Device]] = {}
    links: dict[str, Link] = {}
    for profile in profiles:
        devices = members.setdefault(profile.host, [])
        names.append(f"{profile.host}/{len(devices)}")
        devices.append(profile.device(names[-1]))
        link, slowest = profile.inner_link, links.get(profile.host, profile.inner_link)
        links[profile.host] = Link.slowest((link, slowest))
    hosts = tuple(Host(host, tuple(devices), links[host]) for host, devices in members.items())
    between = network or catalogue().links[catalogue().network]
    return Cluster(NAME, hosts, between if len(hosts) > 1 else None), tuple(names)


_COUNTED = re.compile(r"(.*):(\d+)")


def select(cluster: Cluster, text: str) -> Cluster:
    """A cluster of some devices of another, in its order, under their names.

    Args:
        cluster: to select from.
        text: names with commas between. A name is that of a device, a host or a device model, in full or up to a ``-`` of it, or a
            pattern of such with ``*`` and ``?``; ``NAME:N`` takes the first N of them that no earlier name has taken.

    Raises:
        ClusterError: names of nothing, and larger numbers than there are; all at once.
    """
    faults: list[WhaleError] = []
    taken: dict[str, str] = {}  # by which word
    for word in (part.strip() for part in text.split(",")):
        counted = _COUNTED.fullmatch(word)
        name = counted[1] if counted else word
        found = [device.name for device in cluster.devices if _is_called(device, name)]
        if not found:
            faults.append(ClusterError(f"no device {name!r} in cluster {cluster.name!r}", hint=did_you_mean(name, _names(cluster))))
            continue
        free = [each for each in found if each not in taken]
        number = int(counted[2]) if counted else len(free)
        if counted and not 1 <= number <= len(free):
            takers = dict.fromkeys(taken[each] for each in found if each in taken)
            faults.append(_not_left(cluster, word, number, f"{len(free)} of {len(found)} left", list(takers), name if free else ""))
        taken |= dict.fromkeys(free[:number], word)
    raise_faults(faults)
    return cluster.only(taken)


def _not_left(cluster: Cluster, word: str, number: int, left: str, takers: Sequence[str], name: str) -> ClusterError:
    """The fault of a word that asks for none, or for more devices than earlier words have left."""
    others = f"; {' and '.join(takers)} took the others" if takers else ""
    fewer = f"{name} takes all that are left" if name and number else f"leave {word} out"
    return ClusterError(f"{word} asks for {number} devices; cluster {cluster.name!r} has {left}{others}", hint=fewer)


def _is_called(device: Device, pattern: str) -> bool:
    parts = device.model.split("-")
    models = ("-".join(parts[: stop + 1]) for stop in range(len(parts)))
    return any(fnmatchcase(name, pattern) for name in (device.name, device.host, *models))


def _names(cluster: Cluster) -> Iterator[str]:
    """Names that a device may have, those of many devices first."""
    yield from Counter(device.model for device in cluster.devices)
    yield from (host.name for host in cluster.hosts)
