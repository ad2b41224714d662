"""The hardware as a value: devices on hosts, and the links inside and between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from whale.errors import first_few
from whale.ir.figure import Figure, noise
from whale.units import counted, format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices, by the alpha-beta model."""

    bandwidth: float  # bytes per second, one way, per device; of a shared link for all together
    latency: float  # seconds per message
    shared: bool = False  # whether all concurrent transfers inside a host share it, as on a bus through the host's memory

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency + num_bytes / self.bandwidth

    @staticmethod
    def slowest(links: Iterable[Link]) -> Link:
        """A link as slow as the slowest of these in every respect."""
        found = list(links)
        bandwidth, latency = min(link.bandwidth for link in found), max(link.latency for link in found)
        return Link(bandwidth, latency, any(link.shared for link in found))

    def __str__(self) -> str:
        return f"{format_count(self.bandwidth)}B/s{' shared' if self.shared else ''} + {format_seconds(self.latency)}"


@dataclass(frozen=True, slots=True)
class Handling:
    """Device time that messages take, in addition to the link's: the device does not compute meanwhile."""

    seconds: float = 0.0  # per message sent or received
    per_byte: float = 0.0  # seconds per byte sent or received

    def __bool__(self) -> bool:
        return self.seconds > 0 or self.per_byte > 0

    def __mul__(self, factor: float) -> Handling:
        return Handling(self.seconds * factor, self.per_byte * factor)


NO_HANDLING = Handling()  # of a device that moves messages while it computes, or if unknown


@dataclass(frozen=True)
class Device:
    """One accelerator or CPU rank."""

    name: str  # unique in the cluster (``host0/0``)
    host: str  # name of its host
    model: str  # catalogue name (``V100-32GB``) or ``cpu``
    flops: tuple[tuple[str, float], ...]  # peak FLOP/s per dtype name, as sorted pairs
    memory: int  # bytes usable by the model
    bandwidth: float  # bytes per second of its own memory
    efficiency: float = 1.0  # share of the peak that large matrix products reach, 0 to 1
    kernel_start: float | None = None  # measured seconds to start one kernel; None for the default
    efficiencies: tuple[tuple[str, float], ...] = ()  # of dtypes that have another efficiency, as sorted pairs
    half_width: float = 0.0  # smallest size of a matrix product that reaches half of the efficiency
    traffic: float = 1.0  # share of the bandwidth that kernels reach, 0 to 1
    # seconds its host needs to start one kernel, ahead of the device, so it only binds for shorter kernels; 0 on a CPU
    host_seconds: float = 0.0
    price_per_hour: float | None = None  # in any currency, the same for all devices; None if unknown
    handling: Handling = NO_HANDLING  # of messages; none if it was not measured
    host_link: float = 0.0  # bytes per second, one way, between its memory and its host's; 0 on a CPU
    slowdown: float = 1.0  # factor on the seconds that these figures give, of a device that is throttled, or shared
    sharers: int = 1  # devices of the cluster that are parts of one GPU, this one among them

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.host, self.model, self.flops, self.memory, self.bandwidth, self.efficiency, self.kernel_start))

    def __hash__(self) -> int:  # kinds are keys of most of what is worked out about a plan, and long
        return self._hash

    @cached_property
    def kind(self) -> Device:
        """The device without its name, host and price: devices of equal kind are equally fast and large."""
        return replace(self, name="", host="", price_per_hour=None)

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s at a dtype; float32's if the device has no figure for it."""
        table = dict(self.flops)
        return table.get(dtype, table["float32"])

    def reached_flops(self, dtype: str) -> float:
        """FLOP/s that large matrix products reach at a dtype."""
        return self.peak_flops(dtype) * dict(self.efficiencies).get(dtype, self.efficiency) / self.slowdown

    @property
    def reached_bandwidth(self) -> float:
        """Bytes per second of its own memory that kernels reach."""
        return self.bandwidth * self.traffic / self.slowdown

    @property
    def reached_handling(self) -> Handling:
        return self.handling * self.slowdown

    def told_from(self, others: Collection[Device]) -> str:
        """The model, with slowdown and memory where others of the model have another."""
        slow = {other.slowdown for other in others if other.slowdown > 1}
        slowed = "" if self.slowdown <= 1 else "slowed " if len(slow | {self.slowdown}) == 1 else f"{self.slowdown:.3g}x slowed "
        memory = "" if all(other.memory == self.memory for other in others) else f" of {_format_memory(self.memory)}"
        return f"{slowed}{self.model}{memory}"

    def __str__(self) -> str:
        return f"{self.name} {self.model} {format_bytes(self.memory)}"


def _format_memory(num_bytes: int) -> str:
    """As a data sheet has it: ``20 GB``, ``80 GiB``."""
    whole = ((f"{num_bytes // unit} {name}") for name, unit in (("GiB", 2**30), ("GB", 10**9)) if num_bytes % unit == 0)
    return next(whole, format_bytes(num_bytes))


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its devices in order, and the link between any two of them."""

    name: str
    devices: tuple[Device, ...]
    link: Link
    # bytes per second, one way, of the network card that its devices share; None if each has its own share of the network
    card: float | None = None
    price_per_hour: float | None = None  # of the whole host, in addition to its devices' own; None if unknown
    memory: int | None = None  # bytes of its own memory that trainings may fill; None if unknown


@dataclass(frozen=True)
class Cluster:
    """Hosts and the links between them."""

    name: str
    hosts: tuple[Host, ...]  # in order; device order is host by host
    network: Link | None  # link between devices of different hosts that `pairs` does not name
    pairs: tuple[tuple[tuple[str, str], Link], ...] = ()  # links of particular pairs of hosts, keyed by the two names in sorted order
    measured: tuple[Figure, ...] = ()  # figures that were measured, with their spread

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(filter(None, [noise(self.measured)]))

    @cached_property
    def has_nccl(self) -> bool:
        """Whether every device is a GPU of its own, and NCCL so carries all messages; else Gloo does."""
        return all(device.host_link > 0 and device.sharers == 1 for device in self.devices)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, host by host."""
        return tuple(device for host in self.hosts for device in host.devices)

    @property
    def links(self) -> tuple[Link, ...]:
        """All links: inside hosts, between them."""
        between = () if self.network is None else (self.network,)
        return (*(host.link for host in self.hosts), *between, *(link for _, link in self.pairs))

    @cached_property
    def by_name(self) -> Mapping[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def host_by_name(self) -> Mapping[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def _pairs(self) -> Mapping[tuple[str, str], Link]:
        return dict(self.pairs)

    def card(self, host: str) -> float | None:
        """`Host.card` by the host's name."""
        return self.host_by_name[host].card

    def only(self, devices: Collection[str]) -> Cluster:
        """The cluster with these devices alone, and the hosts that have some."""
        hosts = [replace(host, devices=tuple(own for own in host.devices if own.name in devices)) for host in self.hosts]
        kept = {host.name for host in hosts if host.devices}
        pairs = tuple(pair for pair in self.pairs if kept.issuperset(pair[0]))
        return replace(self, hosts=tuple(host for host in hosts if host.devices), pairs=pairs)

    def slowed(self, slowdowns: Mapping[str, float]) -> Cluster:
        """The cluster with these slowdowns, by device; others stay."""

        def slowed(device: Device) -> Device:
            return replace(device, slowdown=slowdowns.get(device.name, device.slowdown))

        return replace(self, hosts=tuple(replace(host, devices=tuple(map(slowed, host.devices))) for host in self.hosts))

    @cached_property
    def kind_names(self) -> Mapping[Device, str]:
        """What each device type is called: its model, and what differs from other types of that model.

        ``A100-80GB``, ``slowed A100-80GB``, ``A100-80GB of 20 GiB``; ``cpu (host0/1)`` where only other figures differ.
        """
        by_kind = dict[Device, list[str]]()
        for device in self.devices:
            by_kind.setdefault(device.kind, []).append(device.name)
        names = {kind: kind.told_from([other for other in by_kind if other.model == kind.model]) for kind in by_kind}
        counts = Counter(names.values())
        return {kind: name if counts[name] == 1 else f"{name} ({first_few(by_kind[kind])})" for kind, name in names.items()}

    @property
    def slowdowns(self) -> dict[str, float]:
        return {device.name: device.slowdown for device in self.devices}

    def price_per_hour(self, devices: Collection[str]) -> float | None:
        """The price of some devices with their hosts; None if a device and its host have none."""
        hosts = [self.host_by_name[name] for name in dict.fromkeys(self.by_name[device].host for device in devices)]
        unpriced = {host.name for host in hosts if host.price_per_hour is None}
        own = [self.by_name[device] for device in devices]
        if any(device.price_per_hour is None and device.host in unpriced for device in own):
            return None
        return sum(device.price_per_hour or 0.0 for device in own) + sum(host.price_per_hour or 0.0 for host in hosts)

    def models_of(self, devices: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.by_name[name].model for name in devices)

    def price_share(self, device: Device) -> float:
        """A device's price per hour, with an equal part of its host's."""
        host = self.host_by_name[device.host]
        return (device.price_per_hour or 0.0) + (host.price_per_hour or 0.0) / len(host.devices)

    def link(self, a: str, b: str) -> Link:
        """The link between two devices, by name."""
        host_a, host_b = self.by_name[a].host, self.by_name[b].host
        if host_a == host_b:
            return self.host_by_name[host_a].link
        found = self._pairs.get((min(host_a, host_b), max(host_a, host_b)), self.network)
        assert found is not None, "verified when the cluster was read"
        return found

    def __str__(self) -> str:
        lines = [f"cluster {self.name}: {counted(len(self.devices), 'device')} on {counted(len(self.hosts), 'host')}"]
        for host in self.hosts:
            models: dict[str, int] = {}
            for device in host.devices:
                models[device.model] = models.get(device.model, 0) + 1
            kinds = ", ".join(f"{count} x {model}" for model, count in models.items())
            card = f"; one card of {format_count(host.card)}B/s" if host.card is not None else ""
            lines.append(f"  {host.name}: {kinds}; {host.link}{card}")
        if self.network is not None:
            lines.append(f"  between hosts: {self.network}")
        lines += [f"  {a} - {b}: {link}" for (a, b), link in self.pairs]
        return "\n".join(lines)
