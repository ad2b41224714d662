"""Cluster files: hosts, their devices and the links, in YAML, checked so that planning meets no gaps; and back to text.

Devices are written ``8 x V100-32GB``, ``T4``, or as a mapping that overrides the catalogue; a measured figure
``{figure: NAME, value: 81 GFLOP/s, low: ..., high: ..., samples: 22}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path

from whale.config import Document, begun_by, did_you_mean, nearest, parse_yaml, read_yaml
from whale.errors import ClusterError, raise_faults
from whale.hardware.catalogue import (
    CPU,
    SPEEDS,
    KnownDevice,
    catalogue,
    read_efficiency,
    read_flops,
    read_link,
    read_speeds,
    usual_host_link,
)
from whale.hardware.fields import EXAMPLES, Entry
from whale.ir.cluster import NO_HANDLING, Cluster, Device, Handling, Host, Link
from whale.ir.figure import Figure
from whale.units import format_quantity, parse_quantity

Pair = tuple[str, str]


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file.

    Raises:
        ClusterError: the file cannot be read, or describes no whole cluster: an unknown key or device, an amount that is zero or negative,
            hosts with one name, a missing link; all faults at once, each with its line.
    """
    return read_cluster(read_yaml(path, ClusterError), default_name=Path(path).stem)


def parse_cluster(text: str, file: str = "cluster.yaml") -> Cluster:
    """Reads a cluster from YAML text; `file` is its name in errors."""
    return read_cluster(parse_yaml(text, file, ClusterError), default_name=Path(file).stem)


def read_cluster(document: Document, default_name: str) -> Cluster:
    """The cluster of a document, called `default_name` if it has no name."""
    root = Entry(document, "a cluster", document.data)
    hosts: list[Host] = []
    network: Link | None = None
    pairs: dict[Pair, Link] = {}
    measured: tuple[Figure, ...] = ()
    if root.is_mapping(("name", "hosts", "network", "pairs", "measured"), required=("hosts",)):
        hosts = list(_hosts(root.below("hosts", "hosts")))
        network = _link(root.below("network", "network")) if root.has("network") else None
        pairs = _pairs(root.below("pairs", "pairs"), {host.name for host in hosts}) if root.has("pairs") else {}
        measured = tuple(read_figures(root.below("measured", "measured"))) if root.has("measured") else ()
        if not root.has("network"):
            _check_reach(root, [host.name for host in hosts], pairs)
    raise_faults(root.faults)
    return Cluster(root.text("name") or default_name, tuple(hosts), network, tuple(sorted(pairs.items())), measured)


def _hosts(entry: Entry) -> Iterator[Host]:
    if not isinstance(entry.data, list) or not entry.data:
        entry.fault(f"hosts: {entry.data!r} is not a list of at least one host")
        return
    unnamed = 0
    seen: set[str] = set()
    for item in entry.items("host"):
        if not item.is_mapping(("name", "count", "devices", "link", "card", "price_per_hour", "memory"), required=("devices",)):
            continue
        count = item.count("count", 1, MOST)
        name = item.text("name")
        if name is None:
            names = [f"host{unnamed + index}" for index in range(count)]
            unnamed += count
        else:
            names = [f"{name}{index}" for index in range(count)] if item.has("count") else [name]
        for twice in sorted(seen.intersection(names)):
            item.fault(f"two hosts are named {twice!r}", hint="hosts with 'count' are named by number: small0, small1")
        yield from _equal_hosts(item, [host for host in names if host not in seen])
        seen.update(names)


def _equal_hosts(item: Entry, names: Iterable[str]) -> Iterator[Host]:
    """The hosts of one entry: the same devices and link under each name."""
    kinds = read_devices(item.below("devices", f"{item.name}: devices"))
    link = _inner_link(item, kinds)
    card, price = item.quantity("card", "B/s"), item.number("price_per_hour", zero=True)
    memory = item.quantity("memory", "B")
    for name in names:
        devices: list[Device] = []
        for kind in kinds:
            devices += [kind.make(f"{name}/{len(devices) + index}", name) for index in range(kind.count)]
        yield Host(name, tuple(devices), link, card, price, None if memory is None else int(memory))


def _inner_link(item: Entry, kinds: list[DeviceKind]) -> Link:
    """The link inside a host: as written, else the usual one of its devices, as slow as their slowest."""
    written = _link(item.below("link", f"{item.name}: link")) if item.has("link") else None
    found = written or catalogue().usual_link({kind.model for kind in kinds} or {""})
    if found is not None:
        return found
    if sum(kind.count for kind in kinds) > 1 and not item.has("link"):
        models = ", ".join(kind.model for kind in kinds if kind.model not in catalogue().devices)
        item.fault(f"{item.name} has no link between its devices, and the catalogue has none for {models}", hint=_LINK_HINT)
    return Link(kinds[0].make("", "").bandwidth if kinds else 1.0, 0.0)  # of a single device: nothing leaves it


_LINK_HINT = "link: {bandwidth: 12 GB/s, latency: 12 us}, or the name of a known link"


def _link(entry: Entry) -> Link | None:
    """A link by its name in the catalogue, or written out."""
    if not isinstance(entry.data, str):
        return read_link(entry)
    links = catalogue().links
    if entry.data not in links:
        entry.fault(
            f"{entry.name}: unknown link {entry.data!r}", hint=f"{did_you_mean(entry.data, links)} Or {{bandwidth: ..., latency: ...}}"
        )
    return links.get(entry.data)


def _pairs(entry: Entry, hosts: set[str]) -> dict[Pair, Link]:
    found: dict[Pair, Link] = {}
    if not isinstance(entry.data, list):
        entry.fault(f"pairs: {entry.data!r} is not a list of {{hosts: [A, B], link: ...}}")
    for item in entry.items("pair"):
        if not item.is_mapping(("hosts", "link"), required=("hosts", "link")):
            continue
        pair = _pair(item, hosts)
        link = _link(item.below("link", f"{item.name}: link"))
        if pair in found:
            item.fault(f"{item.name}: the link between {pair[0]} and {pair[1]} is given twice")
        elif pair is not None and link is not None:
            found[pair] = link
    return found


def _pair(item: Entry, hosts: set[str]) -> Pair | None:
    names = item.get("hosts")
    if not isinstance(names, list) or len(names) != 2 or str(names[0]) == str(names[1]):
        item.fault(f"{item.name}: hosts {names!r} is not a pair of different hosts", "hosts")
        return None
    a, b = sorted(str(name) for name in names)
    for name in (a, b):
        if name not in hosts:
            close = nearest(name, hosts)
            item.fault(f"{item.name}: there is no host {name!r}", "hosts", hint=f"did you mean {close!r}?" if close else None)
    return (a, b) if {a, b} <= hosts else None


def _check_reach(root: Entry, hosts: list[str], pairs: dict[Pair, Link]) -> None:
    """Without a network, every two hosts need their own link."""
    if len(hosts) > 1 and not pairs:
        root.fault(f"there is no network between the {len(hosts)} hosts", hint="network: {bandwidth: 25 Gbit/s, latency: 30 us}")
        return
    for pair in combinations(sorted(hosts), 2):
        if pair not in pairs:
            root.fault(
                f"there is no link between hosts {pair[0]} and {pair[1]}: no network, and no pair names them",
                hint="add 'network:', or the pair",
            )
            return


MOST = 100_000  # devices of one entry, hosts of one entry: more is a typo

_REPEATED = re.compile(r"(\d+)\s*[x*]\s*(\S.*)")
_FULL = ("memory", "bandwidth", "flops", "efficiency")
_KEYS = ("model", "count", *_FULL, "num_cores", "kernel_start", "price_per_hour", "handling", "slowdown", "sharers", *SPEEDS)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device of a host and its count; ``make(name, host)`` is one of them."""

    model: str
    count: int
    make: Callable[[str, str], Device]


def read_devices(entry: Entry) -> list[DeviceKind]:
    """The kinds of device of one host, in order; faults are noted in the entry."""
    items = list(entry.items(entry.name)) if isinstance(entry.data, list) else [entry]
    if not items:
        entry.fault(f"{entry.name} has no device")
    return [kind for item in items if (kind := _read_kind(item)) is not None]


def _read_kind(entry: Entry) -> DeviceKind | None:
    data = entry.data
    if isinstance(data, dict):
        return _read_mapping(entry)
    if isinstance(data, bool) or not isinstance(data, (str, int)):
        entry.fault(f"{entry.name}: {data!r} is not a device such as 'T4', '8 x V100-32GB' or a mapping with 'model'")
        return None
    match = _REPEATED.fullmatch(str(data))
    count, model = (int(match[1]), match[2]) if match else (1, str(data))
    if not 1 <= count <= MOST:
        entry.fault(f"{entry.name}: {count} devices is not from 1 to {MOST}")
        return None
    known = _find(entry, model)
    return None if known is None else DeviceKind(model, count, known.device)


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


def _read_mapping(entry: Entry) -> DeviceKind | None:
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
        entry.fault(f"{entry.name}: num_cores is given for model {model!r}; only model {CPU!r} takes it", "num_cores")
    base = known or KnownDevice(model, 1, 1.0, (), 1.0, "", (), host_link=usual_host_link(model))
    return DeviceKind(model, count, _with_overrides(base, entry, cores or 1.0))


def _with_overrides(base: KnownDevice, entry: Entry, cores: float) -> Callable[[str, str], Device]:
    usual = base.device("", "", num_cores=cores)
    flops = dict(usual.flops)
    if entry.has("flops"):
        flops |= read_flops(entry.below("flops", f"{entry.name}: flops"))
        if "float32" not in flops:
            entry.fault(f"{entry.name}: flops lacks 'float32'", "flops")
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
        handling=_read_handling(entry),
        slowdown=entry.number("slowdown") or 1.0,
        sharers=entry.count("sharers", 1, MOST),
        **speeds,
    )
    return lambda name, host: replace(changed, name=name, host=host)


def _read_handling(entry: Entry) -> Handling:
    """Device time of messages: ``{seconds: 100 us, bandwidth: 4 GB/s}``, each optional."""
    if not entry.has("handling"):
        return NO_HANDLING
    below = entry.below("handling", f"{entry.name}: handling")
    if not below.is_mapping(("seconds", "bandwidth")):
        return NO_HANDLING
    seconds, bandwidth = below.quantity("seconds", "s", zero=True) or 0.0, below.quantity("bandwidth", "B/s")
    return Handling(seconds, 0.0 if bandwidth is None else 1 / bandwidth)


MOST_SAMPLES = 1_000_000_000
_AMOUNTS = ("value", "low", "high")


def read_figures(entry: Entry) -> Iterator[Figure]:
    """The figures of the list ``measured``; faults are noted in the entry."""
    if not isinstance(entry.data, list):
        entry.fault(f"measured: {entry.data!r} is not a list of figures as `whale probe` writes them")
    for item in entry.items("figure"):
        if not item.is_mapping(("figure", *_AMOUNTS, "samples"), required=("figure", *_AMOUNTS)):
            continue
        name, unit = item.text("figure"), _unit(item)
        amounts = [item.quantity(key, unit, zero=key == "low") for key in _AMOUNTS]
        if name is None or None in amounts:
            continue
        value, low, high = (amount for amount in amounts if amount is not None)
        if not low <= value <= high:
            item.fault(f"{item.name}: value {item.get('value')} is not between low and high", "value")
            continue
        yield Figure(name, unit, value, low, high, item.count("samples", 1, MOST_SAMPLES))


def _unit(item: Entry) -> str:
    """The unit of the value; for none of the known ones seconds, which then fail to read."""
    for unit in EXAMPLES:
        try:
            parse_quantity(str(item.get("value")), unit)
        except ValueError:
            continue
        return unit
    return "s"


def cluster_text(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The YAML of a cluster, under lines of comments."""
    lines = [f"# {comment}" for comment in comments]
    lines += [f"name: {_quoted(cluster.name)}", "hosts:"]
    for host in cluster.hosts:
        lines += _host(host)
    if cluster.network is not None:
        lines.append(f"network: {_link_text(cluster.network)}")
    if cluster.pairs:
        lines += ["pairs:", *(f"  - {{hosts: [{_quoted(a)}, {_quoted(b)}], link: {_link_text(link)}}}" for (a, b), link in cluster.pairs)]
    if cluster.measured:
        lines += ["measured:", *(f"  - {_figure(figure)}" for figure in cluster.measured)]
    return "\n".join(lines) + "\n"


def _host(host: Host) -> Iterator[str]:
    yield f"  - name: {_quoted(host.name)}"
    yield "    devices:"
    for kind, same in groupby(host.devices, key=lambda device: replace(device, name="", host="")):
        yield f"      - {_device(kind, len(list(same)))}"
    yield f"    link: {_link_text(host.link)}"
    if host.card is not None:
        yield f"    card: {format_quantity(host.card, 'B/s')}"
    if host.memory is not None:
        yield f"    memory: {host.memory} B"
    if host.price_per_hour is not None:
        yield f"    price_per_hour: {host.price_per_hour:.6g}"


def _device(kind: Device, count: int) -> str:
    flops = ", ".join(f"{dtype}: {format_quantity(peak, 'FLOP/s')}" for dtype, peak in kind.flops)
    fields = {
        "model": _quoted(kind.model),
        "count": str(count),
        "memory": f"{kind.memory} B",
        "bandwidth": format_quantity(kind.bandwidth, "B/s"),
        "flops": f"{{{flops}}}",
        "efficiency": _efficiency(kind),
        "traffic": f"{kind.traffic:.4g}",
        "host_seconds": format_quantity(kind.host_seconds, "s"),
    }
    if kind.host_link or kind.model != CPU:
        fields["host_link"] = format_quantity(kind.host_link, "B/s")
    fields["half_width"] = f"{kind.half_width:.4g}"
    if kind.kernel_start is not None:
        fields["kernel_start"] = format_quantity(kind.kernel_start, "s")
    if kind.price_per_hour is not None:
        fields["price_per_hour"] = f"{kind.price_per_hour:.6g}"
    if kind.handling:
        fields["handling"] = _handling(kind.handling)
    if kind.slowdown != 1:
        fields["slowdown"] = f"{kind.slowdown:.4g}"
    if kind.sharers != 1:
        fields["sharers"] = str(kind.sharers)
    return _mapping(fields)


def _handling(handling: Handling) -> str:
    fields = {"seconds": format_quantity(handling.seconds, "s")}
    if handling.per_byte:
        fields["bandwidth"] = format_quantity(1 / handling.per_byte, "B/s")
    return _mapping(fields)


def _efficiency(kind: Device) -> str:
    if not kind.efficiencies:
        return f"{kind.efficiency:.4g}"
    return _mapping({dtype: f"{share:.4g}" for dtype, share in (("float32", kind.efficiency), *kind.efficiencies)})


def _link_text(link: Link) -> str:
    fields = {"bandwidth": format_quantity(link.bandwidth, "B/s"), "latency": format_quantity(link.latency, "s")}
    if link.shared:
        fields["shared"] = "true"
    return _mapping(fields)


def _figure(figure: Figure) -> str:
    amounts = {name: format_quantity(getattr(figure, name), figure.unit) for name in ("value", "low", "high")}
    return _mapping({"figure": _quoted(figure.name), **amounts, "samples": str(figure.num_samples)})


def _mapping(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"


def _quoted(text: str) -> str:
    """Text that YAML reads as text."""
    return "'" + text.replace("'", "''") + "'"
