"""Resharding: the copies, and the collectives and messages, that turn one sharding of a tensor into another.

     source (5:3)        target (4:4)            moves
a0  [0 1 2 3 4]      b0 [0 1 2 3]           a0 -> b0  [0, 4)
a1  [5 6 7]          b1 [4 5 6 7]           a0 -> b1  [4, 5)
                                            a1 -> b1  [5, 8)

Each target device receives each element that it lacks exactly once, which is the least possible. A step is a linear map, with its adjoint:

sums          reduce-scattered where nobody wants an element twice, else all-reduced in place, piece by piece
final values  copied by the moves between the regions; devices that exchange nothing are in different steps

kind             its adjoint      received by a device that has n_i of N elements before, m_i after, t devices
slice            pad              0
all-gather       reduce-scatter   N - n_i               what it does not have
all-to-all       all-to-all       m_i - what it has of it already
send             send             m_i - what it has of it already
reduce-scatter   all-gather       m_i (t - 1)           its part, from each of the others
all-reduce       all-reduce       2 N (t - 1) / t       a reduce-scatter and an all-gather, in even pieces

Gradients have shardings of their own: where every copy of a value has the complete gradient, that of the value; where each
copy has seen only some of the users, the copies are terms of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from whale.sharding.index_sets import IndexSpace
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


Kind = Literal["slice", "pad", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]

ADJOINT: Mapping[Kind, Kind] = {
    "slice": "pad",
    "pad": "slice",
    "all-gather": "reduce-scatter",
    "reduce-scatter": "all-gather",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "send": "send",
}


@dataclass(frozen=True)
class Step:
    """One collective or message."""

    kind: Kind
    before: tuple[tuple[int, Region], ...]  # (device, region) of each device that sends; of an all-reduce, the elements summed in place
    after: tuple[tuple[int, Region], ...]  # (device, region) of each device that receives
    moves: tuple[Move, ...]  # the copies; one from a device to itself costs nothing

    @cached_property
    def participants(self) -> tuple[int, ...]:
        return tuple(sorted({device for device, _ in (*self.before, *self.after)}))

    @property
    def adjoint(self) -> Step:
        """The transposed map, for gradients."""
        return Step(ADJOINT[self.kind], self.after, self.before, tuple(move.adjoint for move in self.moves))

    def elements(self, space: IndexSpace) -> Mapping[tuple[int, int], float]:
        """Elements on each link, by (sender, receiver); an all-reduce puts as many on all links."""
        if self.kind == "all-reduce":
            each = 2 * space.num_elements(self.before[0][1]) / len(self.participants)
            return {(a, b): each for a in self.participants for b in self.participants if a != b}
        found: dict[tuple[int, int], float] = {}
        for move in self.moves:
            if move.source != move.target:
                link = move.source, move.target
                found[link] = found.get(link, 0) + space.num_elements(move.region)
        return found

    def __str__(self) -> str:
        return f"{self.kind} over {{{' '.join(map(str, self.participants))}}}: {', '.join(map(str, self.moves))}"


def reshard(source: Sharding, target: Sharding, hosts: Mapping[int, str] | None = None) -> tuple[Step, ...]:
    """The steps that bring a tensor from one sharding to another; none where nothing has to be done.

    Args:
        source, target: of one tensor, on meshes of any sizes; the devices of each term of the target together hold everything.
        hosts: the host of each device, where links within hosts are better than those between.
    """
    if source.held == target.held and (source.is_final if target.is_final else source.own_terms == target.own_terms):
        return ()
    if source.is_final or not target.is_final:
        return tuple(_copied(source, target, hosts))
    if set(source.mesh) == set(target.mesh) and source.held != target.held and not target.has_copies:
        return (_step("reduce-scatter", set(source.mesh), source, target, moves(source, target, hosts)),)
    return (*_summed(source), *_copied(source.final, target, hosts))


def _summed(source: Sharding) -> Iterator[Step]:
    """An all-reduce for each piece that has several terms."""
    for piece in source.pieces:
        if not piece.is_complete:
            ends = tuple((owner, piece.region) for owner in piece.owners)
            adding = sorted(piece.contributors)
            yield Step("all-reduce", ends, ends, tuple(Move(a, b, piece.region) for b in piece.owners for a in adding))


def _copied(source: Sharding, target: Sharding, hosts: Mapping[int, str] | None) -> Iterator[Step]:
    """A step for each connected set of devices, and one for all that only drop a part."""
    found = moves(source, target, hosts)
    dropped: list[Move] = []
    alone = set(source.mesh) & set(target.mesh)  # what no move reaches is let go, and holds zeros
    for group in _connected(found):
        devices = _devices(group)
        if len(devices) > 1:
            yield _step(_kind(devices, source, target), devices, source, target, group)
        elif len(group) > 1 or source.held[group[0].source] != target.held[group[0].target]:
            dropped += group
            continue
        alone -= devices
    if alone:
        yield _step("slice", alone, source, target, dropped)


def _devices(found: Sequence[Move]) -> set[int]:
    return {device for move in found for device in (move.source, move.target)}


def _step(kind: Kind, devices: set[int], source: Sharding, target: Sharding, found: Sequence[Move]) -> Step:
    before = tuple((device, region) for device, region in source.held.items() if device in devices)
    after = tuple((device, region) for device, region in target.held.items() if device in devices)
    return Step(kind, before, after, tuple(found))


def _kind(devices: set[int], source: Sharding, target: Sharding) -> Kind:
    if not devices <= source.held.keys() & target.held.keys():
        return "send"
    wanted: set[Region] = {target.held[device] for device in devices}
    return "all-gather" if len(wanted) == 1 else "all-to-all"


def _connected(found: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves in sets that have no device in common."""
    root: dict[int, int] = {}

    def find(device: int) -> int:
        while root.setdefault(device, device) != device:
            device = root[device]
        return device

    for move in found:
        root[find(move.source)] = find(move.target)
    groups: dict[int, list[Move]] = {}
    for move in found:
        groups.setdefault(find(move.source), []).append(move)
    yield from groups.values()
