"""Checks that ranks that hold the same parameters hold equal weights, and step them with equal settings of the optimizer.

Each rank reports a term of a sum that is zero if copies are equal: for each shared piece the lowest rank adds its digest as
often as there are others, and each other subtracts its own.

    rank 0   layer.weight   + 1 x digest
    rank 1   layer.weight   - 1 x digest     sum 0

Settings are compared in every step; weights, which must be read for it, before the first step and after 1, 2, 4, 8 ... of them.
Copies are equal to the bit on identical devices; differences by rounding on others are examined once more, and accepted.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import flat_bytes
from whale.errors import RuntimeFault
from whale.ir.precision import HALF
from whale.runtime.execute.batch import BITS
from whale.runtime.execute.roster import Roster
from whale.runtime.program.shard.pieces import Index, part
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.units import listed

_MODULUS = (1 << 31) - 1
"""Of a rank's term: the sum of 8,192 terms is exact in float64."""
_CHUNK = 1 << 18
"""Elements per chunk, 16 bytes each: they fit in the cache of a CPU."""
_ODD = 0x1E3779B97F4A7C15
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUM_REPORTED = 6
"""Numbers that a rank reports."""

_Key = tuple[str, int]
"""(parameter, number of a piece)."""


@dataclass(frozen=True)
class _Copy:
    """A piece of a parameter that other ranks hold too: its index in what this rank holds (None for all), its owners in the world, and
    those that have equal values within a round of local steps.
    """

    index: tuple[Index, ...] | None
    owners: tuple[int, ...]
    together: tuple[int, ...]


class EqualCopies:
    """Compares what this rank holds with what others hold.

    Args:
        state: of the training.
        arrive: called before weights are read.
    """

    def __init__(self, holdings: Holdings, roster: Roster, state: EngineState, arrive: Callable[[], None]) -> None:
        self._state, self._world, self._arrive = state, roster.world, arrive
        self._copies: dict[_Key, _Copy] = {}
        self._has_rounds = holdings.plan.rounds is not None
        self._weights: dict[str, int] = {}
        self._compared: dict[str, Tensor] = {}
        self._names = {id(parameter): name for name, parameter in state.kept.items()}
        self._members: list[tuple[list[int], list[str], int]] = []  # of each group: ids of its parameters, names, the sum of their weights
        self._digested: tuple[list[dict[str, object]], tuple[int, ...]] = [], ()  # settings, and the digest of each group
        for name in state.parameters if self._world.can_compare else ():
            assert roster.rank is not None, "an idle rank owns nothing"
            own_state, kept = holdings.plan.state_of(name), holdings.kept(name, roster.rank)
            pieces, held = holdings.pieces(name), holdings.held(name, roster.rank)
            if own_state.is_shared_out:  # then what ops read is there only as they read it
                pieces, held = (holdings.shardings.kept(name).pieces, kept) if kept is not None else ((), held)
            owned = [roster.in_world(piece.owners) for piece in pieces]
            is_kept = name in state.kept and (own_state.kept.sharding == "stage" or own_state.is_shared_out)
            self._compared[name] = (state.kept[name] if is_kept else state.tensors[name]).detach()
            if name in state.kept:
                self._weights[name] = self._factor(roster.in_world(holdings.shardings.kept(name).mesh)) * _digest(name)
            for number, (piece, owners) in enumerate(zip(pieces, owned, strict=True)):
                if not is_kept and own_state.compute.dtype == HALF and holdings.plan.are_unlike(piece.owners):
                    continue  # each reads it in a type of its own
                if self._world.rank in owners and len(owners) > 1:
                    together = roster.in_world(holdings.plan.together(roster.rank, piece.owners))
                    self._copies[name, number] = _Copy(holdings.index(name, piece.region, held), owners, together)

    def report(self) -> tuple[float, ...]:
        """This rank's report: its term; whether it has an optimizer; a digest of the settings of its groups, by position, and its square,
        as the last step left them, and as they are.
        """
        if not self._world.can_compare:
            return (0.0,) * NUM_REPORTED
        settings, noted = self._state.settings, self._state.noted_settings
        if settings != self._digested[0]:
            self._digested = settings, tuple(map(_digest, settings))
        total = sum(digest * weight for digest, (_, weight) in zip(self._digested[1], self._groups(), strict=True))
        if self._state.num_advanced & (self._state.num_advanced - 1) == 0 or (self._has_rounds and not self._state.num_local):
            shared = self._shared()
            sums = self._checksums(shared)
            total += sum(self._factor(owners) * _digest((key, sums[key])) for key, owners in shared.items())
        now = _position(settings)
        positions = [now if noted == settings or not settings else _position(noted), now]
        return total % _MODULUS, bool(settings), positions[0], positions[0] ** 2, positions[1], positions[1] ** 2

    @staticmethod
    def are_equal(sums: Sequence[float]) -> bool:
        """Whether the summed reports show no difference."""
        total, num, noted, noted_squares, now, now_squares = map(int, sums)
        is_apart = num * noted_squares == noted**2 and num * now_squares != now**2
        return total % _MODULUS == 0 and not is_apart

    def check(self) -> None:
        """Compares copies one by one, and raises for the first that differs. A collective of the world.
        Raises RuntimeFault if copies differ by more than rounding, or ranks have changed the settings of the optimizer differently.
        """
        named: dict[str, Mapping[str, object]] = {name: {} for name in self._state.kept}
        settings = self._state.settings
        named |= {name: group for group, (members, _) in zip(settings, self._groups(), strict=True) for name in members}
        reports = cast(list[Any], self._world.gather_objects((named, self._state.noted_settings, settings)))
        self._check_settings([each for each, _, _ in reports])
        self._check_positions([noted for _, noted, _ in reports], [now for _, _, now in reports])
        self._check_weights()

    def _groups(self) -> list[tuple[list[str], int]]:
        """Of each group of the optimizer, the names of its parameters, and the sum of their weights."""
        optimizer = self._state.optimizer  # no tensor is kept here: `replan` lets them go one by one
        groups = [] if optimizer is None else [list(map(id, group["params"])) for group in optimizer.param_groups]
        if groups != [known for known, _, _ in self._members]:
            names = [[self._names[each] for each in params if each in self._names] for params in groups]
            sums = [sum(map(self._weights.__getitem__, members)) for members in names]
            self._members = list(zip(groups, names, sums, strict=True))
        return [(members, weight) for _, members, weight in self._members]

    def _factor(self, owners: Sequence[int]) -> int:
        return len(owners) - 1 if self._world.rank == owners[0] else -1

    def _shared(self) -> dict[_Key, tuple[int, ...]]:
        """The pieces of which others have the same now, and who does."""
        return self._inside if self._state.num_local else self._everywhere

    @cached_property
    def _everywhere(self) -> dict[_Key, tuple[int, ...]]:
        return {key: copy.owners for key, copy in self._copies.items()}

    @cached_property
    def _inside(self) -> dict[_Key, tuple[int, ...]]:
        return {key: copy.together for key, copy in self._copies.items() if len(copy.together) > 1}

    def _checksums(self, shared: Iterable[_Key]) -> dict[_Key, int]:
        """Of some pieces on this rank; waits for its device."""
        self._arrive()
        found = {key: checksum(self._piece(key)).to(self._world.device) for key in shared}
        return dict(zip(found, torch.stack([*found.values()]).cpu().tolist(), strict=True)) if found else {}

    def _piece(self, key: _Key) -> Tensor:
        held, index = self._compared[key[0]], self._copies[key].index
        return held if index is None else part(held, index)

    @staticmethod
    def _check_settings(found: Sequence[Mapping[str, Mapping[str, object]]]) -> None:
        """By parameter: its holders step it with equal settings."""
        for name in dict.fromkeys(name for own in found for name in own):
            _check_alike({rank: own[name] for rank, own in enumerate(found) if name in own}, name)

    @staticmethod
    def _check_positions(noted: Sequence[Any], now: Sequence[Any]) -> None:
        """By position: groups equal on all ranks after the last step must be changed equally by the script."""
        ranks = [rank for rank, groups in enumerate(now) if groups]
        if any(noted[rank] != noted[ranks[0]] for rank in ranks):
            return
        for number in range(max((len(groups) for groups in now), default=0)):
            _check_alike({rank: dict(enumerate(now[rank])).get(number, {}) for rank in ranks}, f"parameter group {number}")

    def _check_weights(self) -> None:
        """By piece: first the bits; where these differ, the values."""
        shared = self._shared()
        sums = self._checksums(shared)
        own = {key: (sums[key], owners, self._piece(key).shape, self._piece(key).dtype) for key, owners in shared.items()}
        found = cast(list[Mapping[_Key, Any]], self._world.gather_objects(own))
        for key, owners in dict.fromkeys((key, own[key][1]) for own in found for key in own):
            if len({found[rank][key][0] for rank in owners}) > 1:
                _, _, shape, dtype = found[owners[0]][key]
                self._check_numbers(key, owners, shape, dtype)

    def _check_numbers(self, key: _Key, owners: Sequence[int], shape: torch.Size, dtype: torch.dtype) -> None:
        """Compares the values of a piece with those of its lowest owner."""
        own = self._piece(key).cpu() if self._world.rank in owners else None
        reference = own if own is not None and self._world.rank == owners[0] else torch.empty(shape, dtype=dtype)
        with self._world.speaking(f"comparing {key[0]}"):
            dist.broadcast(flat_bytes(reference), src=owners[0])
        distance, place = (0.0, 0) if own is None else _farthest(own, reference)
        found = cast(list[tuple[float, int]], self._world.gather_objects((distance, place)))
        distance, place = max(found)
        if distance == 0.0:
            return
        values = self._world.gather_objects(None if own is None else f"{own.reshape(-1)[place].item():.8g}")
        _refuse(
            "weights differ between ranks that hold them",
            key[0],
            {rank: values[rank] for rank in owners},
            "write the same weights on every rank, or use engine.load_state_dict(...); an optimizer that draws random numbers must draw "
            "the same on every rank",
        )


def checksum(value: Tensor) -> Tensor:
    """A 64-bit checksum of a tensor's bits, on its device: their sum as integers, each times an odd number of its position."""
    bits = torch.view_as_real(value) if value.is_complex() else value
    flat = bits.reshape(-1).view(_AS_INTEGERS[bits.element_size()])
    places = torch.arange(min(_CHUNK, flat.numel()), device=value.device) * 2 * _ODD + _ODD
    sums = [(chunk * places[: len(chunk)]).sum() for chunk in torch.split(flat, _CHUNK)]
    return sums[0] if len(sums) == 1 else checksum(torch.stack(sums))


def _position(groups: Sequence[Mapping[str, object]]) -> int:
    """A digest of the settings of all groups, in order."""
    return _digest(list(groups)) & ((1 << BITS) - 1) if groups else 0


def _digest(value: object) -> int:
    """Equal in every process for values with equal `repr`."""
    return zlib.crc32(repr(value).encode())


def _farthest(own: Tensor, reference: Tensor) -> tuple[float, int]:
    """The largest difference of two copies and its position; 0 up to the square root of the type's precision, which may be rounding."""
    ours, theirs = (each.reshape(-1).to(torch.complex128 if each.is_complex() else torch.float64) for each in (own, reference))
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance, place = torch.where(is_same, 0.0, (ours - theirs).abs().nan_to_num(torch.inf)).max(0)
    is_rounded = own.is_floating_point() or own.is_complex()
    rounding = math.sqrt(torch.finfo(own.dtype).eps) * float(theirs.abs().nan_to_num(0.0, 0.0).max()) if is_rounded else 0.0
    return (float(distance), int(place)) if distance > rounding else (0.0, 0)


def _check_alike(of_ranks: Mapping[int, Mapping[str, object]], what: str) -> None:
    """Compares the settings of ranks, key by key."""
    for key in sorted({key for settings in of_ranks.values() for key in settings}):
        values = {rank: settings.get(key) for rank, settings in of_ranks.items()}
        if len({repr(value) for value in values.values()}) > 1:
            _refuse(
                "optimizer settings differ between ranks",
                f"{key} of {what}",
                values,
                "change them on every rank, not inside `if rank == 0:`; give parameter groups that should differ a name: "
                '{"params": ..., "name": "layer 0"}',
            )


def _refuse(fault: str, what: str, values: Mapping[int, object], hint: str) -> NoReturn:
    """Raises who has which value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(f"{value}", []).append(rank)
    said = ", ".join(f"{value} on {listed('rank', own)}" for value, own in ranks.items())
    raise RuntimeFault(f"{fault} ({what}: {said})", hint=hint)
