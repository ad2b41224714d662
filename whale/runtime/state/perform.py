"""Performs the steps of `whale.sharding.reshard` on this rank, between the steps of a training.

    steps        1 -> 0 x[5:8]        each move is copied from what a rank held before into what it holds after
    rank 0       [0 1 2 3 4]     ->   [0 1 2 3 4 5 6 7]
    rank 1       [5 6 7]         ->   nothing

Devices are ranks of the world. Each tensor is waited for before the next, so that no more than one exists twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import World, flat_bytes
from whale.runtime.program.shard.pieces import as_index, part, write_part
from whale.sharding import IndexSpace, Move, Region, Step


@dataclass(frozen=True)
class Whole:
    """A tensor of which ranks hold regions."""

    name: str  # for messages
    shape: tuple[int, ...]  # of all of it
    dtype: torch.dtype
    space: IndexSpace  # of its regions; without dimensions for a tensor that is never cut

    def empty(self, region: Region, device: torch.device) -> Tensor:
        """An uninitialised region."""
        return torch.empty(self.space.shape(region) if self.space.dimensions else self.shape, dtype=self.dtype, device=device)

    def cut(self, held: Tensor, region: Region, within: Region) -> Tensor:
        """A region of what is held; maybe a view."""
        return held if region == within else part(held, tuple(map(as_index, self.space.positions(region, within))))

    def write(self, held: Tensor, region: Region, within: Region, value: Tensor, *, add: bool) -> None:
        """Writes a region into what is held, or adds it."""
        write_part(held, () if region == within else tuple(map(as_index, self.space.positions(region, within))), value, add=add)


def perform(
    steps: Sequence[Step], whole: Whole, held: Tensor | None, region: Region | None, world: World, device: torch.device
) -> Tensor | None:
    """What this rank holds of a tensor after some steps; a collective of all ranks in the steps.

    Args:
        steps: of `whale.sharding.reshard`, between ranks of the world.
        held: what this rank holds; None for nothing. It is returned itself if no step changes it; an all-reduce works in place.
        region: the part of the tensor in `held`.
        device: of what this rank receives.

    Raises:
        RuntimeFault: a peer died, or a wait timed out.
    """
    for step in steps:
        if world.rank not in step.participants:
            continue
        before, after = dict(step.before).get(world.rank), dict(step.after).get(world.rank)
        gotten = [move for move in step.moves if world.rank == move.target]
        is_as_it_was = before == after and [(move.source, move.region) for move in gotten] == [(world.rank, after)]
        given = [move for move in step.moves if world.rank == move.source and not (is_as_it_was and move.target == world.rank)]
        own = {move: whole.cut(held, move.region, region) for move in given if held is not None and region is not None}
        came = _exchange(own, [move for move in gotten if move.source != world.rank], whole, world)
        if is_as_it_was:
            continue
        result = None if after is None else whole.empty(after, device).zero_()  # what nobody sends is zero
        taken: list[Region] = []
        for move in sorted(gotten, key=lambda move: move.source):  # one order, so that sums are equal on all ranks
            assert result is not None and after is not None, "a rank gets what it holds afterwards"
            value = own[move] if move.source == world.rank else came[move]
            adds = any(not move.region.intersect(other).is_empty for other in taken)
            whole.write(result, move.region, after, value.to(device), add=adds)
            taken.append(move.region)
        if step.kind == "all-reduce" and held is not None and region is not None and result is not None and after is not None:
            whole.write(held, after, region, result, add=False)
        else:
            held, region = result, after
    return held


def _exchange(own: Mapping[Move, Tensor], gotten: Sequence[Move], whole: Whole, world: World) -> dict[Move, Tensor]:
    """Sends and receives, as bytes, all in one batch: one by one, ranks could wait for each other in a cycle."""
    sent = {move: flat_bytes(value.to(world.wire_device)) for move, value in own.items() if move.target != world.rank}
    rooms = {move: whole.empty(move.region, world.wire_device) for move in gotten}
    operations = [dist.P2POp(dist.isend, wire, move.target) for move, wire in sent.items()]
    operations += [dist.P2POp(dist.irecv, flat_bytes(room), move.source) for move, room in rooms.items()]
    if operations:
        with world.speaking(f"moving {whole.name}"):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
    return rooms
