"""A cluster out of what each rank says of its own device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale.errors import ClusterError
from whale.hardware.catalogue import catalogue
from whale.ir.cluster import Cluster, Device, Host, Link

NAME = "devices at hand"
_HINT = "describe the devices in a cluster file, as `whale probe` measures them"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One rank's device, as found on its host.

    Attributes:
        host: the host's name.
        model: catalogue name, or the device's own name where the catalogue has none.
        memory: bytes that this rank may count on.
        num_cores: of a CPU rank its share of the host's cores, of a shared GPU this rank's part; may be less than one.
        flops: peak FLOP/s per dtype, sorted pairs; empty for the catalogue's.
        bandwidth: bytes per second of the device's memory; 0 for the catalogue's.
        efficiency: share of the peak that large matrix products reach; 0 for the catalogue's.
        link: the link to the host's other devices; None for the catalogue's.
    """

    host: str
    model: str
    memory: int
    num_cores: float = 1.0
    flops: tuple[tuple[str, float], ...] = ()
    bandwidth: float = 0.0
    efficiency: float = 0.0
    link: Link | None = None

    def device(self, name: str) -> Device:
        """The device under a name.

        Raises:
            ClusterError: the catalogue does not know the model and the profile does not describe it.
        """
        known = catalogue().devices.get(self.model)
        if known is not None:
            return known.device(name, self.host, memory=self.memory, num_cores=self.num_cores)
        if "float32" not in dict(self.flops) or self.bandwidth <= 0 or self.efficiency <= 0:
            raise ClusterError(
                f"nothing is known of device model {self.model!r} on {self.host}",
                hint=_HINT,
            )
        return Device(name, self.host, self.model, self.flops, self.memory, self.bandwidth, self.efficiency)

    @property
    def inner_link(self) -> Link:
        """The link to the host's other devices, as far as this one goes.

        Raises:
            ClusterError: neither the profile nor the catalogue has one.
        """
        found = self.link or catalogue().usual_link({self.model})
        if found is None:
            raise ClusterError(
                f"no link is known for device model {self.model!r} on {self.host}",
                hint=_HINT,
            )
        return found


def make_cluster(profiles: Sequence[DeviceProfile], network: Link | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of the ranks' devices, and each rank's device name.

    Hosts stand in order of their first rank and devices of a host in order of rank (``HOST/0``, ``HOST/1`` ...); the ranks
    of one host need not be neighbours. A host with unlike devices has the slowest of their links.

    Args:
        profiles: by rank.
        network: the link between hosts; the catalogue's if not given.

    Raises:
        ClusterError: there are no profiles, or one describes its device too little.
    """
    if not profiles:
        raise ClusterError("a cluster needs at least one device (no rank has one)")
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
