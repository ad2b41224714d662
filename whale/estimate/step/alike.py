"""Which workers, links and transfers behave alike, so that one of each is simulated for all.

Workers are alike if they do the same, and what they send and receive is alike, to the end; likewise links and transfers.
That is the coarsest equitable partition: start with what is known of each by itself, then tell apart what differs in
its neighbours, until nothing changes. Alike workers do everything at the same times, since nothing is left to chance:

    4 replicas          h0/0 -> h1/0        one replica, whose message has a quarter of h0's and of h1's card
    on 2 hosts          h0/1 -> h1/1
                        h0/2 -> h1/2
                        h0/3 -> h1/3
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Role = tuple[object, ...]

Path = tuple[tuple[int, float], ...]
"""Links by number, each with how often the bytes of what travels pass it."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What can travel between workers.

    Attributes:
        kind: what it is by itself: bytes, latency, place in the schedule.
        parties: the workers that send, receive or take part.
        roles: what each of them is to it.
        links: that it passes.
    """

    kind: Hashable
    parties: tuple[int, ...]
    roles: tuple[Role, ...]
    links: Path

    @property
    def with_roles(self) -> Iterator[tuple[int, Role]]:
        """The parties with their roles."""
        return zip(self.parties, self.roles, strict=True)


@dataclass(frozen=True)
class Classes:
    """Per worker, link and wire the number of its class; classes are numbered from 0 in order of their first member."""

    workers: tuple[int, ...]
    links: tuple[int, ...]
    wires: tuple[int, ...]


def classify(workers: Sequence[Hashable], links: Sequence[Hashable], wires: Sequence[Wire]) -> Classes:
    """Finds what is alike.

    Args:
        workers: what each does by itself.
        links: what each is by itself.
        wires: between the workers.
    """
    of_worker, of_link = _number(workers), _number(links)
    bundles, bundle_of = _bundles(wires)
    of_bundle = _number(bundle.kind for bundle in bundles)
    party = _Meetings(((number, each) for number, bundle in enumerate(bundles) for each in bundle.with_roles), len(bundles), len(workers))
    passed = ((number, (each, (load,))) for number, bundle in enumerate(bundles) for each, load in bundle.links)
    link = _Meetings(passed, len(bundles), len(links))
    count = 0
    while (now := sum(max(colours, default=-1) for colours in (of_worker, of_link, of_bundle))) != count:
        count = now
        of_bundle = _number(zip(of_bundle, party.at_wires(of_worker), link.at_wires(of_link), strict=True))
        of_worker = _number(zip(of_worker, party.at_others(of_bundle), strict=True))
        of_link = _number(zip(of_link, link.at_others(of_bundle), strict=True))
    of_wire = _number((of_bundle[bundle], wire.kind, wire.roles) for bundle, wire in zip(bundle_of, wires, strict=True))
    return Classes(tuple(of_worker), tuple(of_link), tuple(of_wire))


def _bundles(wires: Sequence[Wire]) -> tuple[list[Wire], list[int]]:
    """Wires between the same workers over the same links (the buckets of one ring of owners, say) as one, and the bundle of each.

    They meet the same, so that bundles are alike where all their wires are.
    """
    found: dict[tuple[tuple[int, ...], Path], list[Wire]] = {}
    bundle_of: dict[tuple[tuple[int, ...], Path], int] = {}
    numbers = []
    for wire in wires:
        key = wire.parties, wire.links
        numbers.append(bundle_of.setdefault(key, len(bundle_of)))
        found.setdefault(key, []).append(wire)
    bundles = [
        Wire(tuple(wire.kind for wire in own), parties, tuple(zip(*(wire.roles for wire in own), strict=True)), links)
        for (parties, links), own in found.items()
    ]
    return bundles, numbers


class _Meetings:
    """Which wires meet which workers, or links, in which roles; of tens of thousands, so in arrays.

    Args:
        met: wire, and whom it meets in which role.
        num_wires, num_others: how many there are.
    """

    def __init__(self, met: Iterable[tuple[int, tuple[int, Role]]], num_wires: int, num_others: int) -> None:
        rows = [(wire, other, role) for wire, (other, role) in met]
        self._num_wires, self._num_others = num_wires, num_others
        self._wire, self._other = (np.array([row[index] for row in rows], dtype=np.int64) for index in (0, 1))
        self._role = np.array(_number(role for _, _, role in rows), dtype=np.int64)

    def at_wires(self, colours: Sequence[int]) -> list[bytes]:
        """Per wire, whom it meets: equal for equal roles of others of equal colours."""
        return self._sorted(self._wire, self._num_wires, self._other, colours)

    def at_others(self, colours: Sequence[int]) -> list[bytes]:
        """Per worker or link, the wires that it meets, likewise."""
        return self._sorted(self._other, self._num_others, self._wire, colours)

    def _sorted(self, owners: NDArray[np.int64], num_owners: int, met: NDArray[np.int64], colours: Sequence[int]) -> list[bytes]:
        """Per owner, roles and colours of what it meets, as numbers in order."""
        found = self._role * len(colours) + np.array(colours, dtype=np.int64)[met]
        width = int(found.max(initial=0)) + 1
        ordered = np.sort(owners * width + found)
        bounds = np.searchsorted(ordered, np.arange(num_owners + 1) * width).tolist()
        data, size = (ordered % width).tobytes(), ordered.itemsize
        return [data[size * start : size * stop] for start, stop in pairwise(bounds)]


def _number(colours: Iterable[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(colour, len(known)) for colour in colours]
