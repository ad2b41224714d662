"""Classes of equivalent workers, links and transfers, of which one each is simulated.

Workers are equivalent if they do the same, and what they send and receive is equivalent, recursively; so are links and
transfers. This is the coarsest equitable partition (colour refinement): start with what is known of each alone, then
separate what differs in its neighbours, until nothing changes. Since the engine is deterministic, equivalent workers do
everything at the same times:

    4 replicas          h0/0 -> h1/0        one replica, whose message has a quarter of h0's and of h1's card
    on 2 hosts          h0/1 -> h1/1
                        h0/2 -> h1/2
                        h0/3 -> h1/3

On heterogeneous hosts links are shared in many combinations that rarely matter. So links are first separated by their own
properties only. Wires of one class may then use different links, which is right as long as these are equally fast
(`whale.estimate.events.engine.Uneven`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

Role = tuple[object, ...]

Path = tuple[tuple[int, float], ...]
"""(link, count): how often the bytes of a transfer pass each link."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A possible transfer between workers."""

    kind: Hashable  # its own properties: bytes, latency, place in the schedule
    parties: tuple[int, ...]  # the workers that send, receive or take part
    roles: tuple[Role, ...]  # of each of them
    links: Path  # that it passes

    @property
    def with_roles(self) -> Iterator[tuple[int, Role]]:
        return zip(self.parties, self.roles, strict=True)


@dataclass(frozen=True)
class EquitablePartition:
    """The class of each worker, link and wire; classes are numbered in order of their first member."""

    workers: tuple[int, ...]
    links: tuple[int, ...]
    wires: tuple[int, ...]


def classify(workers: Sequence[Hashable], links: Sequence[Hashable], wires: Sequence[Wire], *, by_links: bool = True) -> EquitablePartition:
    """Finds the classes.

    Args:
        workers, links: own properties of each.
        wires: between the workers.
        by_links: whether wires differ if other wires on their links do; else only by the links' own properties.
    """
    bundles, bundle_of = _bundles(wires)
    party = _Meetings([bundle.parties for bundle in bundles], [role for bundle in bundles for role in bundle.roles], len(workers))
    passed = [bundle.links for bundle in bundles]
    link = _Meetings([[each for each, _ in own] for own in passed], [load for own in passed for _, load in own], len(links))
    of_worker, of_link, of_bundle = _number(workers), _number(links), _number(bundle.kind for bundle in bundles)
    if by_links:
        of_worker, of_link, of_bundle = _nearly(of_worker, of_link, of_bundle, party, link)
    else:
        of_bundle = _number(zip(of_bundle, link.at_wires(of_link), strict=True))
        of_worker, _, of_bundle = _nearly(of_worker, [], of_bundle, party, None)
    count = -1
    while (now := sum(max(colours, default=-1) for colours in (of_worker, of_link, of_bundle))) != count:
        count = now
        met = (link.at_wires(of_link),) if by_links else ()
        of_bundle = _number(zip(of_bundle, party.at_wires(of_worker), *met, strict=True))
        of_worker = _number(zip(of_worker, party.at_others(of_bundle), strict=True))
        of_link = _number(zip(of_link, link.at_others(of_bundle), strict=True))
    of_wire = _number((of_bundle[bundle], wire.kind, wire.roles) for bundle, wire in zip(bundle_of, wires, strict=True))
    return EquitablePartition(tuple(of_worker), tuple(of_link), tuple(of_wire))


def _bundles(wires: Sequence[Wire]) -> tuple[list[Wire], list[int]]:
    """Merges wires between the same workers over the same links (e.g. buckets of one ring); returns bundles, and the bundle of each wire.

    Their neighbours are the same, so bundles are equivalent if all their wires are.
    """
    found: list[list[Wire]] = []
    bundle_of: dict[tuple[tuple[int, ...], Path], int] = {}
    numbers = []
    for wire in wires:
        number = bundle_of.setdefault((wire.parties, wire.links), len(found))
        numbers.append(number)
        if number == len(found):
            found.append([wire])
        else:
            found[number].append(wire)
    return [own[0] if len(own) == 1 else _bundle(own) for own in found], numbers


def _bundle(own: Sequence[Wire]) -> Wire:
    roles = tuple(zip(*(wire.roles for wire in own), strict=True))
    return Wire(tuple(wire.kind for wire in own), own[0].parties, roles, own[0].links)


def _nearly(
    workers: list[int], links: list[int], bundles: list[int], party: _Meetings, link: _Meetings | None
) -> tuple[list[int], list[int], list[int]]:
    """Refines colours by 64-bit hashed sums over neighbours, which is fast.

    Different neighbours might collide, equal ones never differ: the result is, almost surely, the classes, or coarser. The
    exact refinement starts from it.
    """
    of_worker, of_link, of_bundle = (np.array(colours, dtype=np.int64) for colours in (workers, links, bundles))
    count = -1
    while (now := sum(int(colours.max(initial=-1)) for colours in (of_worker, of_link, of_bundle))) != count:
        count = now
        of_bundle = _colours(of_bundle, party.sums_at_wires(of_worker), *([link.sums_at_wires(of_link)] if link else []))
        of_worker = _colours(of_worker, party.sums_at_others(of_bundle))
        of_link = _colours(of_link, link.sums_at_others(of_bundle)) if link else of_link
    return _number(of_worker.tolist()), _number(of_link.tolist()), _number(of_bundle.tolist())


def _colours(before: NDArray[np.int64], *sums: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Numbers that are equal for equal colours with equal sums."""
    for own in sums:
        before = _numbered(before * len(own) + _numbered(own))
    return before


def _numbered(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes numbers to 64 bits: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return result


class _Meetings:
    """Which wires meet which workers, or links, in which roles, as arrays.

    Args:
        met: per wire, the workers or links.
        roles: of each of them, wire by wire.
        num_others: number of workers or links.
    """

    def __init__(self, met: Sequence[Sequence[int]], roles: Iterable[Hashable], num_others: int) -> None:
        self._num_wires, self._num_others = len(met), num_others
        sizes = np.fromiter(map(len, met), dtype=np.int64, count=len(met))
        self._wire = np.repeat(np.arange(len(met), dtype=np.int64), sizes)
        self._other = np.fromiter(chain.from_iterable(met), dtype=np.int64, count=int(sizes.sum()))
        self._role = np.array(_number(roles), dtype=np.int64)
        self._by_other = np.argsort(self._other, kind="stable")
        self._wire_ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
        self._other_ends = np.searchsorted(self._other[self._by_other], np.arange(num_others + 1))

    def at_wires(self, colours: Sequence[int]) -> list[bytes]:
        """Per wire, a key that is equal for equal roles of neighbours with equal colours."""
        return self._sorted(self._wire, self._num_wires, self._other, colours)

    def at_others(self, colours: Sequence[int]) -> list[bytes]:
        """The same per worker or link."""
        return self._sorted(self._other, self._num_others, self._wire, colours)

    def sums_at_wires(self, colours: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Per wire, a hash of the roles and colours of its neighbours."""
        return _between(self._each(colours[self._other], len(colours)), self._wire_ends)

    def sums_at_others(self, colours: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The same per worker or link."""
        return _between(self._each(colours[self._wire], len(colours))[self._by_other], self._other_ends)

    def _each(self, colours: NDArray[np.int64], num_colours: int) -> NDArray[np.uint64]:
        return _mixed((self._role * num_colours + colours).astype(np.uint64))

    def _sorted(self, owners: NDArray[np.int64], num_owners: int, met: NDArray[np.int64], colours: Sequence[int]) -> list[bytes]:
        """Per owner, roles and colours of what it meets, sorted."""
        found = self._role * len(colours) + np.array(colours, dtype=np.int64)[met]
        width = int(found.max(initial=0)) + 1
        ordered = np.sort(owners * width + found)
        bounds = np.searchsorted(ordered, np.arange(num_owners + 1) * width).tolist()
        data, size = (ordered % width).tobytes(), ordered.itemsize
        return [data[size * start : size * stop] for start, stop in pairwise(bounds)]


def _between(numbers: NDArray[np.uint64], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Sums of the numbers between consecutive ends, modulo 2^64."""
    sums = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(numbers, dtype=np.uint64)))[ends]
    result: NDArray[np.uint64] = sums[1:] - sums[:-1]
    return result


def _number(colours: Iterable[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(colour, len(known)) for colour in colours]
