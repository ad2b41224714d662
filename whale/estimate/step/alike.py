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

Role = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Wire:
    """What can travel between workers.

    Attributes:
        kind: what it is by itself: bytes, latency, place in the schedule.
        parties: the workers that send, receive or take part.
        roles: what each of them is to it; comparable.
        links: that it passes.
    """

    kind: Hashable
    parties: tuple[int, ...]
    roles: tuple[Role, ...]
    links: tuple[int, ...]

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
    of_wire = _number([wire.kind for wire in wires])
    count = 0
    while (now := sum(max(colours, default=-1) for colours in (of_worker, of_link, of_wire))) != count:
        count = now
        of_wire = _number([(colour, *_ends(wire, of_worker, of_link)) for colour, wire in zip(of_wire, wires, strict=True)])
        at_workers: list[list[tuple[int, Role]]] = [[] for _ in workers]
        at_links: list[list[int]] = [[] for _ in links]
        for colour, wire in zip(of_wire, wires, strict=True):
            for worker, role in wire.with_roles:
                at_workers[worker].append((colour, role))
            for link in wire.links:
                at_links[link].append(colour)
        of_worker = _number([(colour, *sorted(met)) for colour, met in zip(of_worker, at_workers, strict=True)])
        of_link = _number([(colour, *sorted(met)) for colour, met in zip(of_link, at_links, strict=True)])
    return Classes(tuple(of_worker), tuple(of_link), tuple(of_wire))


def _ends(wire: Wire, of_worker: Sequence[int], of_link: Sequence[int]) -> tuple[object, ...]:
    parties = sorted((role, of_worker[party]) for party, role in wire.with_roles)
    return tuple(parties), tuple(sorted(of_link[link] for link in wire.links))


def _number(colours: Iterable[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(colour, len(known)) for colour in colours]
