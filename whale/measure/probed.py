"""What ranks have measured as a cluster: the median of alike devices, and of the messages between hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale.hardware import CPU, DeviceProfile, catalogue
from whale.ir.cluster import NO_HANDLING, Cluster, Device, Handling, Host, Link
from whale.ir.figure import Figure
from whale.measure.compute_speed import KERNEL_START, MEMORY, PRODUCTS
from whale.measure.handling import HANDLED_BYTES, HANDLING
from whale.measure.link_speed import ALONE, AT_ONCE, BANDWIDTH, LATENCY
from whale.measure.samples import Samples, pooled

NAME = "probed"
SHARED_BELOW = 0.9
"""A card, or a link, is shared if all at once get less than this part of what each gets alone."""
ALIKE = 1.2
"""Devices of one kind on one host are one group up to this ratio of their speeds, or if their samples overlap; a slower one, throttled
or shared, is its own."""


@dataclass(frozen=True)
class Report:
    """What one rank says of itself.

    Attributes:
        profile: its device.
        compute: how fast that is.
        messages: what the rank sent, by where (``inside HOST``, ``HOST - HOST``).
        notes: about its host, in words.
    """

    profile: DeviceProfile
    compute: tuple[Samples, ...]
    messages: tuple[tuple[str, Samples], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Its host and model."""
        return f"{self.profile.host} {self.profile.model}"

    @property
    def speed(self) -> Figure:
        """The fastest float32 product while all compute."""
        products = (each for each in self.compute if each.name.startswith(f"{PRODUCTS} float32") and not each.name.endswith(ALONE))
        return max((Figure.of(each.name, each.unit, each.values) for each in products), key=lambda figure: figure.value)


def probed_cluster(reports: Sequence[Report]) -> Cluster:
    """The cluster of the ranks, by rank, with all figures that were measured.

    Devices have the speeds that they reach while all compute at once, and links inside a host what they give while all send; or,
    where all together get no more than one pair alone, that as a link that they share. Between hosts each device has what one
    alone gets, and where they share it, what all get together is the host's card.
    """
    groups = _groups(reports)
    compute = pooled((group, samples) for report, group in zip(reports, groups, strict=True) for samples in report.compute)
    messages = pooled(item for report in reports for item in report.messages)
    members: dict[str, list[Device]] = {}
    for report, group in zip(reports, groups, strict=True):
        devices = members.setdefault(report.profile.host, [])
        devices.append(_device(report, f"{report.profile.host}/{len(devices)}", compute[group]))
    hosts = tuple(
        Host(name, tuple(devices), _inside(name, devices, messages), _card(name, members, messages)) for name, devices in members.items()
    )
    between = [_link(figures, ALONE) for where, figures in messages.items() if not where.startswith("inside ")]
    network = Link.slowest(between) if between else None
    figures = (figure for found in (compute, messages) for each in found.values() for figure in each)
    return Cluster(NAME, hosts, network, measured=tuple(figures))


def _groups(reports: Sequence[Report]) -> list[str]:
    """Per report what it is pooled with: devices of one kind on one host that are about as fast; the fastest have no number."""
    firsts: dict[str, list[Figure]] = {}
    groups = {}
    for index in sorted(range(len(reports)), key=lambda index: -reports[index].speed.value):
        kind, speed = reports[index].kind, reports[index].speed
        known = firsts.setdefault(kind, [])
        if not known or (known[-1].value > ALIKE * speed.value and known[-1].low > speed.high):
            known.append(speed)
        groups[index] = kind if len(known) == 1 else f"{kind}, slower {len(known) - 1}"
    return [groups[index] for index in range(len(reports))]


def _device(report: Report, name: str, figures: Sequence[Figure]) -> Device:
    flops: dict[str, float] = {}
    for figure in figures:
        _, _, what = figure.name.partition(f": {PRODUCTS} ")
        if what and not what.endswith(ALONE):
            dtype = what.partition(",")[0]
            flops[dtype] = max(flops.get(dtype, 0.0), figure.value)
    memory, start = (_value(figures, what) for what in (MEMORY, KERNEL_START))
    assert memory is not None and start is not None, "every rank measures them"
    profile, known = report.profile, catalogue().devices.get(report.profile.model)
    is_cpu = profile.model == CPU
    return Device(
        name,
        profile.host,
        profile.model,
        tuple(sorted(flops.items())),
        profile.memory,
        memory,
        kernel_start=start if is_cpu else None,
        half_width=known.half_width if known is not None else 0.0,
        host_seconds=0.0 if is_cpu else start,
        handling=_handling(figures),
    )


def _handling(figures: Sequence[Figure]) -> Handling:
    seconds, rate = (_value(figures, what) for what in (HANDLING, HANDLED_BYTES))
    if seconds is None or rate is None:
        return NO_HANDLING
    return Handling(seconds, 1 / rate)


def _value(figures: Sequence[Figure], what: str) -> float | None:
    return next((figure.value for figure in figures if figure.name.endswith(f": {what}")), None)


def _link(figures: Sequence[Figure], how: str) -> Link:
    """The link as one pair alone has it, or all at once."""
    bandwidth, latency = (_value(figures, f"{what}, {how}") for what in (BANDWIDTH, LATENCY))
    assert bandwidth is not None and latency is not None, "a pair measures both"
    return Link(bandwidth, latency)


def _inside(host: str, devices: Sequence[Device], messages: Mapping[str, Sequence[Figure]]) -> Link:
    """As all at once have it; one that they share where they get together no more than one alone."""
    found = messages.get(f"inside {host}")
    if found is None:
        return Link(devices[0].bandwidth, 0.0)  # of a single device: nothing leaves it
    alone, together = _link(found, ALONE), _link(found, AT_ONCE)
    if len(devices) * together.bandwidth * SHARED_BELOW < alone.bandwidth:
        return Link(alone.bandwidth, together.latency, shared=True)
    return together


def _card(host: str, members: Mapping[str, Sequence[Device]], messages: Mapping[str, Sequence[Figure]]) -> float | None:
    """Bytes per second of what the devices of a host share towards others; None where they do not share."""
    found = []
    for where, figures in messages.items():
        ends = where.split(" - ")
        alone, together = (_value(figures, f"{BANDWIDTH}, {how}") for how in (ALONE, AT_ONCE))
        if host in ends and alone is not None and together is not None and together < SHARED_BELOW * alone:
            found.append(together * min(len(members[end]) for end in ends))
    return min(found, default=None)
