"""Moves: which device copies which elements to which, so that every device of a target has its region.

         source (5:3)        target (4:4)            moves
    a0  [0 1 2 3 4]      b0 [0 1 2 3]           a0 -> b0  [0, 4)
    a1  [5 6 7]          b1 [4 5 6 7]           a0 -> b1  [4, 5)
                                                a1 -> b1  [5, 8)

Each target device receives each element that it lacks exactly once, which is the least possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whale.sharding.sharding import Region, Sharding


@dataclass(frozen=True, slots=True)
class Move:
    """A region copied from a device to a device, maybe the same one; terms that arrive at one place are added."""

    source: int
    target: int
    region: Region

    @property
    def adjoint(self) -> Move:
        return Move(self.target, self.source, self.region)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {self.region}"


def moves(source: Sharding, target: Sharding, hosts: Mapping[int, str] | None = None) -> tuple[Move, ...]:
    """The moves that turn one sharding into another, target device by target device.

    A device prefers what it holds itself, then a holder on its host, then the holder that has sent least so far, then one at the
    same relative place in its mesh, so that copies spread. Each final element comes from one holder. Where a sum of n terms becomes
    a sum of m terms, term k goes to term ``k * m // n``, whose devices add what they receive. A term is zero where no device holds it.

    Args:
        source, target: of one tensor; the devices of each term of the target together hold everything.
        hosts: the host of each device; None where all links are equal.
    """
    senders = _Senders(source, hosts or {})
    terms = _order(source)
    ends = _order(target)
    found: list[Move] = []
    for position, (device, region) in enumerate(zip(target.mesh, target.regions, strict=True)):
        place = position * len(source.mesh) / len(target.mesh)
        end, wanted = ends[target.own_terms[position]], region.intersect(source.hull)
        for term, number in terms.items():
            if number * len(ends) // len(terms) == end and not wanted.is_empty:
                found += sorted(senders.deliver(device, place, wanted, term), key=senders.order)
    return tuple(found)


def _order(sharding: Sharding) -> dict[int, int]:
    """Each term's number, in order of the mesh."""
    return {term: number for number, term in enumerate(dict.fromkeys(sharding.own_terms))}


class _Senders:
    """The devices of a source, and how much each has sent so far."""

    def __init__(self, source: Sharding, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._position = {device: position for position, device in enumerate(source.mesh)}
        self._sent = dict.fromkeys(source.mesh, 0)
        self._of_term: dict[int, dict[Region, list[int]]] = {}
        for device, region, term in zip(source.mesh, source.regions, source.own_terms, strict=True):
            holders = self._of_term.setdefault(term, {})
            if not region.is_empty:
                holders.setdefault(region, []).append(device)

    def order(self, move: Move) -> tuple[object, ...]:
        """By sender, then by place."""
        return self._position[move.source], move.region.intervals

    def deliver(self, device: int, place: float, wanted: Region, term: int) -> Iterator[Move]:
        """The moves that give a device its region of one term; `place` is the matching position in the source's mesh."""
        near = [
            (region, min(holders, key=lambda holder: self._cost(holder, device, place)))
            for region, holders in self._meeting(wanted, term)
            if not region.intersect(wanted).is_empty
        ]
        near.sort(key=lambda pair: self._cost(pair[1], device, place))
        missing = [wanted]
        for region, holder in near:
            rest: list[Region] = []
            for part in missing:
                common = part.intersect(region)
                if common.is_empty:
                    rest.append(part)
                    continue
                yield Move(holder, device, common)
                if holder != device:
                    self._sent[holder] += common.volume
                rest += part.without(region)
            missing = rest
        assert not missing or len(self._of_term) > 1, f"nobody holds {', '.join(map(str, missing))}"

    def _meeting(self, wanted: Region, term: int) -> Iterator[tuple[Region, list[int]]]:
        """The regions of a term that may overlap with another, by the first axis alone: a cheap filter for a hot path."""
        for region, holders in self._of_term[term].items():
            if not region.intervals:
                yield region, holders
                continue
            axis, start, stop = region.intervals[0]
            low, high = wanted.interval(axis) or (start, stop)
            if start < high and low < stop:
                yield region, holders

    def _cost(self, holder: int, device: int, place: float) -> tuple[object, ...]:
        position = self._position[holder]
        is_far = bool(self._hosts) and self._hosts.get(holder) != self._hosts.get(device)
        return holder != device, is_far, self._sent[holder], abs(position - place), position
