"""Clusters changed in one respect: one more device, faster links, or unlimited memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from whale.ir.cluster import Cluster, Device, Host, Link

PLENTY_BYTES = 1 << 50  # device memory that fits everything


def one_more(cluster: Cluster, kind: Device) -> tuple[Cluster, str]:
    """A cluster with one more device of a type, and its place in words.

    It joins the first host with several devices and one of that type; else it gets a host of its own like the first that
    has one, if a network links any two hosts; else it joins that host. A host priced as a whole costs proportionally more.
    """
    having = [host for host in cluster.hosts if any(device.kind == kind for device in host.devices)]
    crowded = next((host for host in having if len(host.devices) > 1), None)
    own = crowded or having[0]
    like = next(device for device in own.devices if device.kind == kind)
    if crowded is None and cluster.network is not None:
        names = (f"{own.name}-like{number or ''}" for number in count())
        name = next(each for each in names if each not in cluster.host_by_name)
        alone = replace(own, name=name, devices=(replace(like, name=f"{name}/0", host=name),))
        return replace(cluster, hosts=(*cluster.hosts, alone)), f"on a host like {own.name}"
    name = next(f"{own.name}/{number}" for number in count(len(own.devices)) if f"{own.name}/{number}" not in cluster.by_name)
    price = None if own.price_per_hour is None else own.price_per_hour * (len(own.devices) + 1) / len(own.devices)
    grown = replace(own, devices=(*own.devices, replace(like, name=name)), price_per_hour=price)
    return replace(cluster, hosts=tuple(grown if host is own else host for host in cluster.hosts)), f"in host {own.name}"


def faster_between(cluster: Cluster, factor: float) -> Cluster:
    """Multiplies the bandwidth of links between hosts and of network cards."""
    hosts = tuple(replace(host, card=None if host.card is None else host.card * factor) for host in cluster.hosts)
    network = None if cluster.network is None else _faster(cluster.network, factor)
    return replace(cluster, hosts=hosts, network=network, pairs=tuple((pair, _faster(link, factor)) for pair, link in cluster.pairs))


def with_plenty(cluster: Cluster) -> Cluster:
    def roomy(host: Host) -> Host:
        return replace(host, devices=tuple(replace(device, memory=PLENTY_BYTES) for device in host.devices))

    return replace(cluster, hosts=tuple(map(roomy, cluster.hosts)))


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth * factor)
