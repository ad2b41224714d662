"""Resharding: the steps that turn one sharding of a tensor into another.

    sums          are made where they lie: reduce-scattered where nobody wants an element twice, else all-reduced piece by piece
    final values  are copied by the moves between the regions; devices that exchange nothing are in different steps

Gradients go the same way back: they have shardings of their own. Where every copy of a value has the whole gradient, that
is the value's own sharding; where each copy has seen only a part of the users, the copies are terms of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from whale.sharding.moves import Move, moves
from whale.sharding.regions import Region
from whale.sharding.sharding import Sharding
from whale.sharding.steps import Kind, Step


def reshard(source: Sharding, target: Sharding, hosts: Mapping[int, str] | None = None) -> tuple[Step, ...]:
    """The steps that bring a tensor from one sharding to another; none where nothing has to be done.

    Args:
        source, target: of one tensor, on meshes of any sizes; of a target that is a sum, the devices of each term together hold
            everything.
        hosts: per device, its host, where links within hosts are better than those between.
    """
    if source.held == target.held and (source.is_final if target.is_final else source.own_terms == target.own_terms):
        return ()
    if source.is_final or not target.is_final:
        return tuple(_copied(source, target, hosts))
    if set(source.mesh) == set(target.mesh) and source.held != target.held and not target.has_copies:
        return (_step("reduce-scatter", set(source.mesh), source, target, moves(source, target, hosts)),)
    return (*_summed(source), *_copied(source.final, target, hosts))


def _summed(source: Sharding) -> Iterator[Step]:
    """An all-reduce for each piece that lies in several terms."""
    for piece in source.pieces:
        if not piece.is_complete:
            ends = tuple((owner, piece.region) for owner in piece.owners)
            adding = sorted(piece.contributors)
            yield Step("all-reduce", ends, ends, tuple(Move(a, b, piece.region) for b in piece.owners for a in adding))


def _copied(source: Sharding, target: Sharding, hosts: Mapping[int, str] | None) -> Iterator[Step]:
    """A step for each set of devices that exchange something among them, and one for all that only let go of a part."""
    found = moves(source, target, hosts)
    apart: list[Move] = []
    alone = set(source.mesh) & set(target.mesh)  # what no move reaches is let go, and holds zeros
    for group in _connected(found):
        devices = _devices(group)
        if len(devices) > 1:
            yield _step(_kind(devices, source, target), devices, source, target, group)
        elif len(group) > 1 or source.held[group[0].source] != target.held[group[0].target]:
            apart += group
            continue
        alone -= devices
    if alone:
        yield _step("slice", alone, source, target, apart)


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
