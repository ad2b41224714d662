"""Cluster files: hosts, their devices and the links, in YAML, checked so that planning never meets a hole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

from whale.config import Document, did_you_mean, nearest, parse_yaml, read_yaml
from whale.errors import ClusterError, raise_faults
from whale.hardware.catalogue import catalogue, read_link
from whale.hardware.device_entry import MOST, Kind, read_devices
from whale.hardware.fields import Entry
from whale.hardware.figure_entry import read_figures
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.figure import Figure

Pair = tuple[str, str]


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file.

    Raises:
        ClusterError: the file cannot be read, or describes no whole cluster: an unknown key or device, an amount that is
            zero or negative, hosts of one name, a link that is missing; all faults at once, each with its line.
    """
    return read_cluster(read_yaml(path, ClusterError), default_name=Path(path).stem)


def parse_cluster(text: str, file: str = "cluster.yaml") -> Cluster:
    """Reads a cluster from YAML text; `file` is what errors call it."""
    return read_cluster(parse_yaml(text, file, ClusterError), default_name=Path(file).stem)


def read_cluster(document: Document, default_name: str) -> Cluster:
    """The cluster that a document describes; its name is `default_name` if it says none."""
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
        entry.fault(f"hosts is a list of at least one host ({entry.data!r} is not)")
        return
    unnamed = 0
    seen: set[str] = set()
    for item in entry.items("host"):
        if not item.is_mapping(("name", "count", "devices", "link", "card", "price_per_hour"), required=("devices",)):
            continue
        count = item.count("count", 1, MOST)
        name = item.text("name")
        if name is None:
            names = [f"host{unnamed + index}" for index in range(count)]
            unnamed += count
        else:
            names = [f"{name}{index}" for index in range(count)] if item.has("count") else [name]
        for twice in sorted(seen.intersection(names)):
            item.fault(f"two hosts have the name {twice!r}", hint="hosts with 'count' are named by number: small0, small1")
        yield from _alike(item, [host for host in names if host not in seen])
        seen.update(names)


def _alike(item: Entry, names: Iterable[str]) -> Iterator[Host]:
    """The hosts of one entry: the same devices and link under each name."""
    kinds = read_devices(item.below("devices", f"{item.name}: devices"))
    link = _inner_link(item, kinds)
    card, price = item.quantity("card", "B/s"), item.number("price_per_hour", zero=True)
    for name in names:
        devices: list[Device] = []
        for kind in kinds:
            devices += [kind.make(f"{name}/{len(devices) + index}", name) for index in range(kind.count)]
        yield Host(name, tuple(devices), link, card, price)


def _inner_link(item: Entry, kinds: list[Kind]) -> Link:
    """The link inside a host: as written, else the usual one of its devices, as slow as the slowest of them."""
    written = _link(item.below("link", f"{item.name}: link")) if item.has("link") else None
    found = written or catalogue().usual_link({kind.model for kind in kinds} or {""})
    if found is not None:
        return found
    if sum(kind.count for kind in kinds) > 1 and not item.has("link"):
        models = ", ".join(kind.model for kind in kinds if kind.model not in catalogue().devices)
        item.fault(f"{item.name} needs a link between its devices (the catalogue knows none for {models})", hint=_LINK_HINT)
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
        entry.fault(f"pairs is a list of {{hosts: [A, B], link: ...}} ({entry.data!r} is not)")
    for item in entry.items("pair"):
        if not item.is_mapping(("hosts", "link"), required=("hosts", "link")):
            continue
        pair = _pair(item, hosts)
        link = _link(item.below("link", f"{item.name}: link"))
        if pair in found:
            item.fault(f"{item.name}: the link between {pair[0]} and {pair[1]} stands twice")
        elif pair is not None and link is not None:
            found[pair] = link
    return found


def _pair(item: Entry, hosts: set[str]) -> Pair | None:
    names = item.get("hosts")
    if not isinstance(names, list) or len(names) != 2 or str(names[0]) == str(names[1]):
        item.fault(f"{item.name}: hosts is two different hosts ({names!r} is not)", "hosts")
        return None
    a, b = sorted(str(name) for name in names)
    for name in (a, b):
        if name not in hosts:
            close = nearest(name, hosts)
            item.fault(f"{item.name}: there is no host {name!r}", "hosts", hint=f"did you mean {close!r}?" if close else None)
    return (a, b) if {a, b} <= hosts else None


def _check_reach(root: Entry, hosts: list[str], pairs: dict[Pair, Link]) -> None:
    """Without a network, every two hosts need a link of their own."""
    if len(hosts) > 1 and not pairs:
        root.fault(
            f"{len(hosts)} hosts need a network between them (none is given)", hint="network: {bandwidth: 25 Gbit/s, latency: 30 us}"
        )
        return
    for pair in combinations(sorted(hosts), 2):
        if pair not in pairs:
            root.fault(
                f"hosts {pair[0]} and {pair[1]} need a link (there is no network, and no pair names them)",
                hint="add 'network:', or the pair",
            )
            return
