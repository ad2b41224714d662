"""One device, or several alike, of a cluster file: ``8 x V100-32GB``, ``T4``, or a mapping that overrides the catalogue."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from whale.config import begun_by, nearest
from whale.hardware.catalogue import CPU, SPEEDS, KnownDevice, catalogue, read_efficiency, read_flops, read_speeds
from whale.hardware.fields import Entry
from whale.ir.cluster import NO_HANDLING, Device, Handling

MOST = 100_000
"""Devices of one entry, hosts of one entry: more is a slip of the pen."""

_REPEATED = re.compile(r"(\d+)\s*[x*]\s*(\S.*)")
_KEYS = ("model", "count", "memory", "bandwidth", "flops", "efficiency", "num_cores", "kernel_start", "price_per_hour", "handling", *SPEEDS)
_FULL = ("memory", "bandwidth", "flops", "efficiency")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device of a host and how many of it there are; ``make(name, host)`` is one of them."""

    model: str
    count: int
    make: Callable[[str, str], Device]


def read_devices(entry: Entry) -> list[Kind]:
    """The kinds of device of one host, in order; faults are noted in the entry."""
    items = list(entry.items(entry.name)) if isinstance(entry.data, list) else [entry]
    if not items:
        entry.fault(f"{entry.name} needs at least one device")
    return [kind for item in items if (kind := _read_kind(item)) is not None]


def _read_kind(entry: Entry) -> Kind | None:
    data = entry.data
    if isinstance(data, dict):
        return _read_mapping(entry)
    if isinstance(data, bool) or not isinstance(data, (str, int)):
        entry.fault(f"{entry.name} is a device such as 'T4', '8 x V100-32GB' or a mapping with 'model' ({data!r} is not)")
        return None
    match = _REPEATED.fullmatch(str(data))
    count, model = (int(match[1]), match[2]) if match else (1, str(data))
    if not 1 <= count <= MOST:
        entry.fault(f"{entry.name}: the number of devices is from 1 to {MOST} ({count} is not)")
        return None
    known = _find(entry, model)
    return None if known is None else Kind(model, count, known.device)


def _find(entry: Entry, model: str) -> KnownDevice | None:
    devices = catalogue().devices
    if model not in devices:
        longer, close = begun_by(model, devices), nearest(model, devices)
        meant = f"did you mean {close!r}? " if close else f"known: {', '.join(devices)}. "
        hint = f"which of {', '.join(longer)}? " if len(longer) > 1 else meant
        entry.fault(
            f"unknown device model {model!r}", hint=f"{hint}Or describe it in full: model, {', '.join(_FULL)}; `whale probe` measures it"
        )
        return None
    return devices[model]


def _read_mapping(entry: Entry) -> Kind | None:
    if not entry.is_mapping(_KEYS, required=("model",)):
        return None
    model = entry.text("model")
    if model is None:
        return None
    described = all(entry.has(key) for key in _FULL)
    known = catalogue().devices.get(model) if model in catalogue().devices or described else _find(entry, model)
    if known is None and not described:
        return None
    count = entry.count("count", 1, MOST)
    cores = entry.number("num_cores") if entry.has("num_cores") else 1.0
    if entry.has("num_cores") and model != CPU:
        entry.fault(f"{entry.name}: num_cores belongs to model {CPU!r} (this is {model!r})", "num_cores")
    base = known or KnownDevice(model, 1, 1.0, (), 1.0, "", ())
    return Kind(model, count, _with_overrides(base, entry, cores or 1.0))


def _with_overrides(base: KnownDevice, entry: Entry, cores: float) -> Callable[[str, str], Device]:
    usual = base.device("", "", num_cores=cores)
    flops = dict(usual.flops)
    if entry.has("flops"):
        flops |= read_flops(entry.below("flops", f"{entry.name}: flops"))
        if "float32" not in flops:
            entry.fault(f"{entry.name}: flops needs at least 'float32'", "flops")
    speeds = read_speeds(entry)
    written = read_efficiency(entry) if entry.has("efficiency") else None
    efficiency, efficiencies = written or (usual.efficiency, usual.efficiencies)
    memory, bandwidth = entry.quantity("memory", "B"), entry.quantity("bandwidth", "B/s")
    changed = replace(
        usual,
        flops=tuple(sorted(flops.items())),
        memory=max(1, int(memory)) if memory is not None else usual.memory,
        bandwidth=bandwidth if bandwidth is not None else usual.bandwidth,
        efficiency=efficiency,
        kernel_start=entry.quantity("kernel_start", "s", zero=True),
        price_per_hour=entry.number("price_per_hour", zero=True),
        efficiencies=efficiencies,
        half_width=speeds.get("half_width", usual.half_width),
        traffic=speeds.get("traffic", usual.traffic),
        host_seconds=speeds.get("host_seconds", usual.host_seconds),
        handling=_read_handling(entry),
    )
    return lambda name, host: replace(changed, name=name, host=host)


def _read_handling(entry: Entry) -> Handling:
    """What messages take of the device: ``{seconds: 100 us, bandwidth: 4 GB/s}``, of which either may be left out."""
    if not entry.has("handling"):
        return NO_HANDLING
    below = entry.below("handling", f"{entry.name}: handling")
    if not below.is_mapping(("seconds", "bandwidth")):
        return NO_HANDLING
    seconds, bandwidth = below.quantity("seconds", "s", zero=True) or 0.0, below.quantity("bandwidth", "B/s")
    return Handling(seconds, 0.0 if bandwidth is None else 1 / bandwidth)
