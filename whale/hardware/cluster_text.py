"""A cluster as the text of a cluster file, which reads back as the same cluster to four digits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from whale.ir.cluster import Cluster, Device, Handling, Host, Link
from whale.ir.figure import Figure
from whale.units import format_quantity


def cluster_text(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The YAML of a cluster.

    Args:
        cluster: to write.
        comments: lines to stand above it.
    """
    lines = [f"# {comment}" for comment in comments]
    lines += [f"name: {_quoted(cluster.name)}", "hosts:"]
    for host in cluster.hosts:
        lines += _host(host)
    if cluster.network is not None:
        lines.append(f"network: {_link(cluster.network)}")
    if cluster.pairs:
        lines += ["pairs:", *(f"  - {{hosts: [{_quoted(a)}, {_quoted(b)}], link: {_link(link)}}}" for (a, b), link in cluster.pairs)]
    if cluster.measured:
        lines += ["measured:", *(f"  - {_figure(figure)}" for figure in cluster.measured)]
    return "\n".join(lines) + "\n"


def _host(host: Host) -> Iterator[str]:
    yield f"  - name: {_quoted(host.name)}"
    yield "    devices:"
    for kind, alike in groupby(host.devices, key=lambda device: replace(device, name="", host="")):
        yield f"      - {_device(kind, len(list(alike)))}"
    yield f"    link: {_link(host.link)}"
    if host.card is not None:
        yield f"    card: {format_quantity(host.card, 'B/s')}"
    if host.memory is not None:
        yield f"    memory: {host.memory} B"
    if host.price_per_hour is not None:
        yield f"    price_per_hour: {host.price_per_hour:.6g}"


def _device(kind: Device, count: int) -> str:
    flops = ", ".join(f"{dtype}: {format_quantity(peak, 'FLOP/s')}" for dtype, peak in kind.flops)
    said = {
        "model": _quoted(kind.model),
        "count": str(count),
        "memory": f"{kind.memory} B",
        "bandwidth": format_quantity(kind.bandwidth, "B/s"),
        "flops": f"{{{flops}}}",
        "efficiency": _efficiency(kind),
        "traffic": f"{kind.traffic:.4g}",
        "host_seconds": format_quantity(kind.host_seconds, "s"),
    }
    if kind.host_link:
        said["host_link"] = format_quantity(kind.host_link, "B/s")
    said["half_width"] = f"{kind.half_width:.4g}"
    if kind.kernel_start is not None:
        said["kernel_start"] = format_quantity(kind.kernel_start, "s")
    if kind.price_per_hour is not None:
        said["price_per_hour"] = f"{kind.price_per_hour:.6g}"
    if kind.handling:
        said["handling"] = _handling(kind.handling)
    return _mapping(said)


def _handling(handling: Handling) -> str:
    said = {"seconds": format_quantity(handling.seconds, "s")}
    if handling.per_byte:
        said["bandwidth"] = format_quantity(1 / handling.per_byte, "B/s")
    return _mapping(said)


def _efficiency(kind: Device) -> str:
    if not kind.efficiencies:
        return f"{kind.efficiency:.4g}"
    return _mapping({dtype: f"{share:.4g}" for dtype, share in (("float32", kind.efficiency), *kind.efficiencies)})


def _link(link: Link) -> str:
    said = {"bandwidth": format_quantity(link.bandwidth, "B/s"), "latency": format_quantity(link.latency, "s")}
    if link.shared:
        said["shared"] = "true"
    return _mapping(said)


def _figure(figure: Figure) -> str:
    amounts = {name: format_quantity(getattr(figure, name), figure.unit) for name in ("value", "low", "high")}
    return _mapping({"figure": _quoted(figure.name), **amounts, "samples": str(figure.num_samples)})


def _mapping(said: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in said.items()) + "}"


def _quoted(text: str) -> str:
    """Text that YAML cannot take for anything else."""
    return "'" + text.replace("'", "''") + "'"
