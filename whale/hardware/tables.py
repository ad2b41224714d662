"""The catalogue as Markdown tables, for the reference; made from the data, so that they cannot differ."""

from __future__ import annotations

from whale.hardware.catalogue import catalogue
from whale.units import format_bytes, format_count, format_seconds


def device_table() -> str:
    """Every device: memory, bandwidth, speeds, efficiency, traffic, link."""
    lines = ["| device | memory | bandwidth | float32 | float16 | bfloat16 | efficiency | traffic | link |", "|" + " --- |" * 9]
    for device in catalogue().devices.values():
        flops = dict(device.flops)
        speeds = [f"{format_count(flops[dtype])}FLOP/s" if dtype in flops else "-" for dtype in ("float32", "float16", "bfloat16")]
        cells = [
            f"`{device.name}`",
            format_bytes(device.memory),
            f"{format_count(device.bandwidth)}B/s",
            *speeds,
            ", ".join([f"{device.efficiency:g}", *(f"{dtype} {share:g}" for dtype, share in device.efficiencies)]),
            f"{device.traffic:g}",
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
