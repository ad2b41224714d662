"""Second owners: which devices copy the state to host memory, so that the loss of any one host loses none of it.

    host a     0  stage 0 of replica 0       1  stage 1         copied: stage 0 by 0 and 2, which are on two hosts
    host b     2  stage 0 of replica 1                          copied: stage 1 by 1 and, since no other host holds it, sent to 2

Each piece is copied by one owner on each of two hosts. If only one host holds it, one owner there copies it and sends it to a
device of another host. If all devices are on one host, each counts as a host: then the loss of one device loses nothing.
The result depends on the plan, the shapes and the hosts alone: the runtime and the estimate both use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from typing import Literal

from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.sharding.parameters import ParameterShardings

NUM_STEPS_KEPT = 2
"""Copies of two steps exist: while one is made, some ranks may be lost and others be past its update."""


@dataclass(frozen=True)
class SecondOwners:
    """Who copies what; devices are numbers."""

    # per device, by parameter or buffer, the pieces (numbers in `Sharding.pieces`) that it copies after a step
    copied: tuple[Mapping[str, tuple[int, ...]], ...]
    sent: tuple[frozenset[str], ...]  # per device, those of the names that no other host copies
    targets: Mapping[int, int]  # by device that sends, the one that keeps what it sends
    held_bytes: tuple[int, ...]  # per device, of weights and their optimizer state
    copied_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    survives: Literal["host", "device"]  # what may be lost: a host, or a device where all are on one host

    @cached_property
    def sources(self) -> Mapping[int, tuple[int, ...]]:
        """By device that keeps copies of others, those others."""
        found: dict[int, tuple[int, ...]] = {}
        for source, target in self.targets.items():
            found[target] = (*found.get(target, ()), source)
        return found

    def kept_bytes(self, device: int) -> int:
        """Of the copies of others that a device keeps, for one step."""
        return sum(self.sent_bytes[source] for source in self.sources.get(device, ()))

    def host_bytes(self, device: int) -> int:
        """Host memory that a device takes for all copies."""
        return NUM_STEPS_KEPT * (self.copied_bytes[device] + self.kept_bytes(device))

    def fault_bytes(self, device: int) -> int:
        """What a device takes of it beside them where others are lost, and it leaves all copies and what it holds to the next start."""
        return self.host_bytes(device) + self.held_bytes[device]


def second_owners(plan: Plan, graph: ModelGraph, shardings: ParameterShardings, hosts: Sequence[str]) -> SecondOwners:
    """Assigns the copies, the largest first, each to the device with the least.

    Args:
        shardings: of the plan; devices are its ranks.
        hosts: of each device of the plan, then of the idle ones.
    """
    survives: Literal["host", "device"] = "host" if len(set(hosts)) > 1 else "device"
    if survives == "device":
        hosts = [str(device) for device in range(len(hosts))]
    load, held = [0] * len(hosts), [0] * len(hosts)
    copied: list[dict[str, list[int]]] = [{} for _ in hosts]
    sizes: list[dict[str, int]] = [{} for _ in hosts]
    sent: list[set[str]] = [set() for _ in hosts]
    on_hosts: dict[tuple[int, ...], list[list[int]]] = {}
    for num_bytes, name, number, owners in sorted(_pieces(plan, graph, shardings), key=lambda piece: -piece[0]):
        if owners not in on_hosts:
            on_hosts[owners] = list(_by_host(owners, hosts).values())
        for device in owners:
            held[device] += num_bytes
        least = nsmallest(2, (min(own, key=load.__getitem__) for own in on_hosts[owners]), key=load.__getitem__)
        for device in least:
            load[device] += num_bytes
            copied[device].setdefault(name, []).append(number)
            sizes[device][name] = sizes[device].get(name, 0) + num_bytes
        if len(least) == 1:
            sent[least[0]].add(name)
    sent_bytes = [sum(sizes[device][name] for name in names) for device, names in enumerate(sent)]
    sources = [device for device, names in enumerate(sent) if names]
    return SecondOwners(
        tuple({name: tuple(sorted(numbers)) for name, numbers in own.items()} for own in copied),
        tuple(map(frozenset, sent)),
        _targets(sorted(sources, key=lambda device: -sent_bytes[device]), sent_bytes, load, len(plan.devices), hosts),
        tuple(held),
        tuple(load),
        tuple(sent_bytes),
        survives,
    )


def _pieces(plan: Plan, graph: ModelGraph, shardings: ParameterShardings) -> Iterator[tuple[int, str, int, tuple[int, ...]]]:
    """Bytes, name, number and owners of each piece of the state."""
    for name in shardings.parameters:
        per_element = plan.state_of(name).element_bytes
        for number, piece in enumerate(shardings.kept(name).pieces):
            yield shardings.num_elements(graph, name, piece.region) * per_element, name, number, piece.owners


def _by_host(devices: Sequence[int], hosts: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for device in devices:
        found.setdefault(hosts[device], []).append(device)
    return found


def _targets(
    sources: Sequence[int], sent_bytes: Sequence[int], load: Sequence[int], num_planned: int, hosts: Sequence[str]
) -> dict[int, int]:
    """By device that sends, the least loaded device of another host; idle devices count where all others are on one host."""
    planned = range(num_planned)
    able = planned if len({hosts[device] for device in planned}) > 1 else range(len(hosts))
    members = {host: [(load[device], device) for device in own] for host, own in _by_host(able, hosts).items()}
    loads = [(sum(num_bytes for num_bytes, _ in own), host) for host, own in members.items()]
    heapify(loads)
    for own in members.values():
        heapify(own)
    found: dict[int, int] = {}
    for source in sources:
        own_host = [heappop(loads)] if loads[0][1] == hosts[source] else []
        kept, host = heappop(loads)
        num_bytes, found[source] = members[host][0]
        heapreplace(members[host], (num_bytes + sent_bytes[source], found[source]))
        for entry in (*own_host, (kept + sent_bytes[source], host)):
            heappush(loads, entry)
    return found
