"""Copies of the state in host memory of two ranks on two hosts: what one host alone holds is sent to its second owner (`second_owners`).

    in step 8, on rank 2     copies of step 7   own pieces | pieces of rank 5
                             copies of step 6   own pieces | pieces of rank 5

All copies of a step are of one moment. A rank begins to overwrite those of step 6 as step 8 ends. All ranks have begun step 8 then, so
they have all copies of step 7: whenever a rank is lost, the others have all copies of one of the last two steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import World
from whale.comm.waiting import Launched
from whale.ir.graph import ModelGraph
from whale.runtime.checkpoint.boxes import Box
from whale.runtime.checkpoint.contents import Piece
from whale.runtime.execute.roster import Roster
from whale.runtime.state.holdings import Holdings
from whale.sharding.second_owners import NUM_STEPS_KEPT, second_owners

_POSITION = "extra.position"
"""The key of where the data goes on: a script that leaves an epoch has changed nothing of the state."""


@dataclass(frozen=True)
class Duty:
    chosen: Mapping[str, tuple[int, ...]]  # pieces to copy, by name, as of `find_shares`
    sent: frozenset[str]  # names whose copies are sent
    target: int | None  # rank of the world; None where it sends nothing
    sources: tuple[int, ...]  # ranks whose pieces it keeps


@dataclass(frozen=True)
class StepCopies:
    step: int
    number: int  # of copies made before, equal on all ranks
    room: int  # number of the memory where they lie
    pieces: tuple[Piece, ...]  # as of `snapshot`, like `plain`
    plain: Mapping[str, Any]


class StateCopies:
    """The copies of the last steps on this rank.

    Args:
        world: this process among its peers.
        hosts: of each rank of the world.

    Attributes:
        steps: the complete ones, the newest first.
        duty: of this rank, under the plan at work.
        fault_bytes: what all ranks of this host leave in its memory when others are lost: copies, and the state that they hold.
        survives: what may be lost, as of `SecondOwners`.
        follows_steps: whether copies are made as a step ends; else as the next begins, since the script writes into the state in between.
        is_with_script: whether the script may have changed what was copied, and ranks have not compared since.
    """

    duty: Duty
    fault_bytes: int
    survives: str
    follows_steps = True
    is_with_script = False

    def __init__(self, world: World, hosts: Sequence[str]) -> None:
        self.steps: tuple[StepCopies, ...] = ()
        self._own: tuple[Mapping[object, Tensor], Mapping[str, Any]] = {}, {}
        self._world, self._hosts, self._number = world, hosts, 0
        self._rooms: list[dict[object, Tensor]] = [{} for _ in range(NUM_STEPS_KEPT)]

    def take_up(self, roster: Roster, holdings: Holdings, model: ModelGraph) -> None:
        """Goes on under a plan; the copies that there are stay."""
        order = [*roster.world_ranks, *sorted(set(roster.all_ranks) - set(roster.world_ranks))]
        found = second_owners(roster.plan, model, holdings.shardings, [self._hosts[rank] for rank in order])
        own, self.survives = order.index(self._world.rank), found.survives
        host = self._hosts[self._world.rank]
        self.fault_bytes = sum(found.fault_bytes(device) for device, rank in enumerate(order) if self._hosts[rank] == host)
        target, sources = found.targets.get(own), sorted(order[source] for source in found.sources.get(own, ()))
        self.duty = Duty(found.copied[own], found.sent[own], None if target is None else order[target], tuple(sources))

    def make(self, step: int, pieces: Sequence[Piece], plain: Mapping[str, Any]) -> None:
        """Copies what this rank has to; all ranks of the world call it at the same point.

        The copies replace the oldest, and once complete, others of the same step. On a GPU the host waits for all launched work.

        Args:
            step: steps done.
            pieces, plain: what this rank copies, as `snapshot` gives it.

        Raises:
            RuntimeFault: a peer died, or a wait timed out.
        """
        duty = self.duty
        self._await_device()
        self.is_with_script = False
        self.steps = self.steps[: NUM_STEPS_KEPT - 1]
        free = next(number for number in range(NUM_STEPS_KEPT) if all(number != each.room for each in self.steps))
        rooms = self._rooms[free]
        sent = [piece for piece in pieces if _name(piece) not in duty.chosen or _name(piece) in duty.sent]  # the others: of plain data
        stays = [piece for piece in pieces if _name(piece) in duty.chosen and _name(piece) not in duty.sent]
        found = [*self._copied(rooms, "sent", sent), *self._copied(rooms, "stays", stays)]
        self._await_device()
        self._own = {_place(piece): piece[-1] for piece in found}, _lasting(plain)
        known = dict(plain)
        for table, their_plain, source in self._exchanged(step, rooms, sent, plain, duty):
            found += _views(rooms[source], table)
            known = {**their_plain, **known}
        each_once = {_place(piece): piece for piece in found}  # what is not divided with a parameter, several ranks have
        whole = StepCopies(step, self._number, free, tuple(each_once.values()), known)
        self.steps = (whole, *(each for each in self.steps if each.step != step))
        self._number += 1

    def forget(self, step: int | None = None) -> None:
        """Drops the copies of all steps, or of one: the state has been replaced."""
        self.steps = tuple(each for each in self.steps if step is not None and each.step != step)

    def has(self, step: int) -> bool:
        """Whether there are copies of a step, the last."""
        return bool(self.steps) and self.steps[0].step == step

    def are_of(self, pieces: Sequence[Piece], plain: Mapping[str, Any]) -> bool:
        """Whether the last copies equal, bit by bit, what this rank would copy now, except for the data position."""
        copies, others = self._own
        now = {_place(piece): piece[-1] for piece in pieces}
        is_same = others == _lasting(plain) and now.keys() == copies.keys()
        return is_same and all(_is_same(value, copies[place]) for place, value in now.items())

    def _await_device(self) -> None:
        if self._world.device.type == "cuda":
            world, event = self._world, torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(world.device))
            world.waits.wait_for_device(event.query, "copying the state", range(world.size), lambda: world.notice.has_come)

    def _copied(self, rooms: dict[object, Tensor], what: str, pieces: list[Piece]) -> list[Piece]:
        """Copies into memory that is reused; ``pieces`` are sorted into the order in which they lie there."""
        pieces.sort(key=lambda piece: -piece[-1].itemsize)  # so that each lies at a multiple of its item's size
        room = self._room(rooms, what, sum(value.nbytes for *_, value in pieces))
        found = _views(room, [_form(piece) for piece in pieces])
        for (*_, value), (*_, copy) in zip(pieces, found, strict=True):
            copy.copy_(value, non_blocking=True)
        return found

    def _room(self, rooms: dict[object, Tensor], what: object, size: int) -> Tensor:
        if what not in rooms or rooms[what].numel() != size:
            rooms.pop(what, None)
            rooms[what] = torch.empty(size, dtype=torch.uint8, pin_memory=self._world.device.type == "cuda")
        return rooms[what]

    def _exchanged(
        self, step: int, rooms: dict[object, Tensor], pieces: Sequence[Piece], plain: Mapping[str, Any], duty: Duty
    ) -> list[tuple[list[_Form], Mapping[str, Any], int]]:
        """Sends to the second owner and receives from others: of each, the forms of its pieces, which lie in its room, and plain data."""
        for source in [each for each in rooms if isinstance(each, int) and each not in duty.sources]:
            del rooms[source]  # of another plan
        told: dict[int, Tensor] = {}
        given: list[Tensor] = []
        if duty.target is not None:
            own = torch.frombuffer(bytearray(pickle.dumps(([_form(piece) for piece in pieces], dict(plain)))), dtype=torch.uint8)
            given = [torch.tensor([own.numel(), rooms["sent"].numel()]), own, rooms["sent"]]
        sizes = {source: torch.empty(2, dtype=torch.int64) for source in duty.sources}
        self._travel(step, duty.target, given[:1], {source: [size] for source, size in sizes.items()})
        for source, size in sizes.items():
            told[source] = torch.empty(int(size[0]), dtype=torch.uint8)
            self._room(rooms, source, int(size[1]))
        self._travel(step, duty.target, given[1:], {source: [told[source], rooms[source]] for source in duty.sources})
        return [(*pickle.loads(bytes(told[source].numpy())), source) for source in duty.sources]

    def _travel(self, step: int, target: int | None, given: Sequence[Tensor], taken: Mapping[int, Sequence[Tensor]]) -> None:
        waits, action = self._world.waits, f"copying the state of step {step} to second owners"
        peers = [*taken, *([] if target is None else [target])]
        with waits.speaking(action, peers):
            works = [dist.irecv(room, source, tag=tag) for source, rooms in taken.items() for tag, room in enumerate(rooms)]
            works += [dist.isend(tensor, target, tag=tag) for tag, tensor in enumerate(given)]
        for work in works:
            assert work is not None
            waits.wait(Launched(work, blocks_host=True), action, peers)


def _lasting(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if key != _POSITION}


def _is_same(value: Tensor, copy: Tensor) -> bool:
    """Whether two tensors have the same bits; the second may lie in host memory, of which little is brought at a time."""
    if (value.dtype, value.shape) != (copy.dtype, copy.shape):
        return False
    bits = [torch.split(each.reshape(-1).view(_BITS[min(each.itemsize, 8)]), _NUM_COMPARED) for each in (value, copy)]
    return all(torch.equal(own, other.to(own.device)) for own, other in zip(*bits, strict=True))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUM_COMPARED = 1 << 24


def _place(piece: Piece) -> tuple[str, Box]:
    """What a piece is of."""
    return piece[0], piece[2]


_Form = tuple[str, tuple[int, ...], Box, torch.dtype, tuple[int, ...]]
"""A piece without its values: key, shape of the whole, rectangle, type, shape."""


def _form(piece: Piece) -> _Form:
    key, shape, box, value = piece
    return key, tuple(shape), box, value.dtype, tuple(value.shape)


def _views(room: Tensor, forms: Sequence[_Form]) -> list[Piece]:
    """The pieces that lie in bytes, one after the other."""
    found: list[Piece] = []
    end = 0
    for key, shape, box, dtype, form in forms:
        size = dtype.itemsize * prod(form)
        found.append((key, shape, box, room[end : end + size].view(dtype).view(form)))
        end += size
    return found


def _name(piece: Piece) -> str:
    """The parameter or buffer that a piece is of; of others something that is no name."""
    section, _, rest = piece[0].partition(".")
    return rest if section == "model" else rest.rpartition(".")[0] if section == "optimizer" else ""
