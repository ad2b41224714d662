"""Devices and links known by name; the figures are in ``devices.yaml``, and appear in the reference as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from whale.config import parse_yaml
from whale.errors import ClusterError, raise_faults
from whale.hardware.fields import Entry
from whale.ir.cluster import Device, Link
from whale.units import format_bytes, format_count, format_seconds

CPU = "cpu"
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
SPEEDS = ("half_width", "traffic", "host_seconds", "host_link")  # properties of a device besides its data sheet and efficiency
FILE = "devices.yaml"
UNKNOWN_HOST_LINK = 12e9
"""`Device.host_link` of a GPU that the catalogue lacks: PCI Express 3."""


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A model of device."""

    name: str  # ``V100-32GB``; ``cpu`` is one core
    memory: int  # bytes
    bandwidth: float  # bytes per second of its own memory
    flops: tuple[tuple[str, float], ...]  # peak FLOP/s per dtype, sorted pairs; float32 is among them
    efficiency: float  # share of the peak that large matrix products reach
    link: str  # name of the usual link inside a host
    nvml: tuple[tuple[str, ...], ...]  # word lists, each of which identifies the device in NVML's name for it
    efficiencies: tuple[tuple[str, float], ...] = ()  # of dtypes that have another efficiency, sorted pairs
    half_width: float = 0.0  # as of `Device`, like the following
    traffic: float = 1.0
    host_seconds: float = 0.0
    host_link: float = 0.0

    def device(self, name: str, host: str, *, memory: int | None = None, num_cores: float = 1.0) -> Device:
        """One of these, on a host.

        Args:
            name: unique in the cluster.
            host: name of its host.
            memory: bytes, if not the usual amount.
            num_cores: factor on the catalogue's speeds: a CPU's number of cores, or the part of a shared GPU.
        """
        flops = tuple((dtype, peak * num_cores) for dtype, peak in self.flops)
        reached = self.efficiency, None, self.efficiencies, self.half_width, self.traffic, self.host_seconds
        bandwidth, link = self.bandwidth * num_cores, self.host_link
        return Device(name, host, self.name, flops, memory or self.memory, bandwidth, *reached, host_link=link)


@dataclass(frozen=True)
class Catalogue:
    """Devices and links by name."""

    devices: Mapping[str, KnownDevice]
    links: Mapping[str, Link]
    network: str  # name of the default link between hosts

    def usual_link(self, models: set[str]) -> Link | None:
        """The link inside a host of these device models, as slow as their slowest; None if a model is unknown."""
        if not models <= set(self.devices):
            return None
        return Link.slowest(self.links[self.devices[model].link] for model in models)

    def match_nvml(self, name: str) -> KnownDevice | None:
        """The device for NVML's name (``NVIDIA A100-SXM4-80GB``); None if unknown."""
        words = set(_words(name))
        if "MIG" in words:  # a slice of a GPU is not the GPU
            return None
        hits = [(len(entry), device) for device in self.devices.values() for entry in device.nvml if words.issuperset(entry)]
        return max(hits, key=lambda hit: hit[0])[1] if hits else None


def _words(name: str) -> tuple[str, ...]:
    return tuple(name.upper().replace("-", " ").replace("_", " ").split())


def usual_host_link(model: str) -> float:
    """`Device.host_link` of a model, by the catalogue; what it lacks is a GPU."""
    known = catalogue().devices.get(model)
    return UNKNOWN_HOST_LINK if known is None else known.host_link


@cache
def catalogue() -> Catalogue:
    text = files("whale.hardware").joinpath(FILE).read_text(encoding="utf-8")
    return read_catalogue(text)


def read_catalogue(text: str) -> Catalogue:
    """A catalogue from YAML text. Raises ClusterError: unknown or missing keys, or wrong amounts; all faults at once."""
    document = parse_yaml(text, FILE, ClusterError)
    root = Entry(document, "the catalogue", document.data)
    root.is_mapping(("links", "network", "devices"), required=("links", "network", "devices"))
    links = {name: read_link(entry) for name, entry in _named(root, "links", "link")}
    raise_faults(root.faults)
    devices = {name: _read_device(entry, name) for name, entry in _named(root, "devices", "device")}
    known = {name: link for name, link in links.items() if link is not None}
    for name, device in devices.items():
        if device.link not in known:
            root.fault(f"device {name}: unknown link {device.link!r}", "devices", name)
    network = root.text("network") or ""
    if network not in known:
        root.fault(f"unknown link {network!r}", "network")
    raise_faults(root.faults)
    return Catalogue(devices, known, network)


def _named(root: Entry, section: str, what: str) -> list[tuple[str, Entry]]:
    content = root.get(section)
    names = list(content) if isinstance(content, dict) else []
    return [(name, root.below(section, section).below(name, f"{what} {name}")) for name in names]


def read_link(entry: Entry) -> Link | None:
    """A link written as ``{bandwidth: 25 Gbit/s, latency: 20 us}``; None, with faults noted, if it is wrong."""
    if not entry.is_mapping(("bandwidth", "latency", "shared"), required=("bandwidth", "latency")):
        return None
    bandwidth, latency = entry.quantity("bandwidth", "B/s"), entry.quantity("latency", "s", zero=True)
    return None if bandwidth is None or latency is None else Link(bandwidth, latency, entry.flag("shared"))


def read_flops(entry: Entry) -> dict[str, float]:
    """Peak FLOP/s per dtype, from ``{float32: 15.7 TFLOP/s, float16: 125 TFLOP/s}``."""
    if not entry.is_mapping(DTYPES):
        return {}
    amounts = {dtype: entry.quantity(dtype, "FLOP/s") for dtype in DTYPES}
    return {dtype: amount for dtype, amount in amounts.items() if amount is not None}


def read_efficiency(entry: Entry) -> tuple[float, tuple[tuple[str, float], ...]] | None:
    """An efficiency, and those of dtypes that have their own: ``0.8``, or ``{float32: 0.8, float16: 0.6}``, the first for all others."""
    if not isinstance(entry.get("efficiency"), dict):
        found = entry.number("efficiency", high=1)
        return None if found is None else (found, ())
    below = entry.below("efficiency", f"{entry.name}: efficiency")
    if not below.is_mapping(DTYPES, required=("float32",)):
        return None
    shares = {dtype: below.number(dtype, high=1) for dtype in DTYPES}
    own = {dtype: share for dtype, share in shares.items() if share is not None}
    return (own.pop("float32"), tuple(sorted(own.items()))) if "float32" in own else None


def _read_device(entry: Entry, name: str) -> KnownDevice:
    keys = ("memory", "bandwidth", "flops", "efficiency", "link", "nvml")
    entry.is_mapping((*keys, *SPEEDS), required=keys)
    nvml = entry.get("nvml")
    efficiency, efficiencies = read_efficiency(entry) or (0.0, ())
    return KnownDevice(
        name,
        int(entry.quantity("memory", "B") or 0),
        entry.quantity("bandwidth", "B/s") or 0.0,
        tuple(sorted(read_flops(entry.below("flops", f"device {name}: flops")).items())),
        efficiency,
        entry.text("link") or "",
        tuple(_words(str(item)) for item in nvml) if isinstance(nvml, list) else (),
        efficiencies,
        **read_speeds(entry),
    )


def read_speeds(entry: Entry) -> dict[str, Any]:
    """The given ones of `SPEEDS`."""
    found = {
        "half_width": entry.number("half_width", zero=True),
        "traffic": entry.number("traffic", high=1),
        "host_seconds": entry.quantity("host_seconds", "s", zero=True),
        "host_link": entry.quantity("host_link", "B/s", zero=True),
    }
    return {name: amount for name, amount in found.items() if amount is not None}


def device_table() -> str:
    """Every device: memory, bandwidth, peak speeds, link."""
    lines = ["| device | memory | bandwidth | float32 | float16 | bfloat16 | link |", "|" + " --- |" * 7]
    for device in catalogue().devices.values():
        flops = dict(device.flops)
        speeds = [f"{format_count(flops[dtype])}FLOP/s" if dtype in flops else "-" for dtype in ("float32", "float16", "bfloat16")]
        cells = [
            f"`{device.name}`",
            format_bytes(device.memory),
            f"{format_count(device.bandwidth)}B/s",
            *speeds,
            device.link,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def link_table() -> str:
    """Every link: bandwidth, latency, and whether a host's devices share it."""
    rows = [
        f"| `{name}` | {format_count(link.bandwidth)}B/s | {format_seconds(link.latency)} | {'yes' if link.shared else ''} |"
        for name, link in catalogue().links.items()
    ]
    return "\n".join(["| link | bandwidth, one way | latency | shared by a host's devices |", "| --- | --- | --- | --- |", *rows])
