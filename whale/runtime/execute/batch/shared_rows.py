"""The rows that several ranks of a replica read for themselves, and one number by which they find out that they read unlike ones.

Stages, and the devices of a split group, take the same rows; each rank reads its own from the dataset. Of every piece of rows
the lowest rank adds its digest as often as there are others, and each of these takes its own away: nothing is left if all agree.

    rank 0   rows 0:4   + 1 x d(0:4)
    rank 1   rows 0:4   - 1 x d(0:4)     sum 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from whale.ir.plan import Plan
from whale.runtime.execute.batch.batch_view import BatchView
from whale.runtime.execute.batch.digest import combined, digests
from whale.runtime.execute.batch.rank_batch import rank_rows
from whale.runtime.execute.seat import Seat

_WEIGHTS = 1021
"""Pieces weigh unlike amounts below this, so that what differs in one is not made up for in another."""


@dataclass(frozen=True)
class SharedPiece:
    """Consecutive rows that several ranks read.

    Attributes:
        start, stop: of the global batch.
        factor: of this rank's digest.
    """

    start: int
    stop: int
    factor: int


def shared_pieces(plan: Plan, seat: Seat, num_rows: int) -> tuple[SharedPiece, ...]:
    """The pieces of a batch that this rank reads, and others too. Replicas share none."""
    devices = {device for stage in plan.replicas[seat.replica].stages for device in stage.virtual_device.devices}
    rows = {rank: rank_rows(plan, rank, num_rows) for rank in sorted(plan.rank_of[device] for device in devices)}
    bounds = sorted({bound for intervals in rows.values() for interval in intervals for bound in interval})
    found = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        holders = [rank for rank, intervals in rows.items() if any(low <= start and stop <= high for low, high in intervals)]
        if seat.rank in holders and len(holders) > 1:
            sign = len(holders) - 1 if seat.rank == holders[0] else -1
            found.append(SharedPiece(start, stop, sign * (1 + number % _WEIGHTS)))
    return tuple(found)


def balance(batch: BatchView, pieces: Sequence[SharedPiece]) -> int:
    """This rank's part of a sum that is zero if all ranks have read the same. What lies on a device is waited for."""
    names = sorted(batch.with_rows)
    return sum(piece.factor * combined(digests({name: batch.rows(name, piece.start, piece.stop) for name in names})) for piece in pieces)
