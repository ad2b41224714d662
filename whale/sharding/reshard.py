"""Resharding: the collectives and messages that turn one sharding of a tensor into another, each a linear map with its adjoint.

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
from whale.sharding.moves import Move, moves
from whale.sharding.sharding import Region, Sharding

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
