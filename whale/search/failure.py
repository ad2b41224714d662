"""Why a search ends without a plan, and what would help: how much more memory, or how many devices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from whale.errors import ConfigError, PlanError, WhaleError
from whale.ir.cluster import Device
from whale.planning.pipeline.balance import MemoryShortage, shortage
from whale.search.arrangement import Team
from whale.search.bounds import Bounds
from whale.search.sketch import Sketches
from whale.search.space import Lineup
from whale.units import format_bytes

NUM_LINEUPS = 24
"""Of so many line-ups, those that come nearest, it is worked out how much memory they would need."""

MOST = 64.0
"""Memories are not imagined larger than so many times."""


def failure(
    faults: Sequence[WhaleError], lineups: Sequence[Lineup], bounds: Bounds, sketches: Sketches, micro_batches: int | None
) -> WhaleError:
    """The error that says it.

    Args:
        faults: of the plans that were tried.
        lineups: of the space.
        bounds: know the bytes of the model.
        sketches: know what fits, roughly.
        micro_batches: their number, where it is set.
    """
    missing = min((max(map(bounds.shortage, lineup)) for lineup in lineups), default=0)
    shortages = [fault for fault in faults if isinstance(fault, MemoryShortage)]
    if not faults and not missing:
        return ConfigError("the batch has a row for every device and micro-batch, and the model a place to cut for every stage")
    if faults and not shortages:
        return faults[0]
    hint = "; or ".join(_remedies(lineups, bounds, sketches, micro_batches)) or "devices with more memory, or more of them"
    if shortages:
        nearest = min(shortages, key=lambda fault: fault.num_bytes)
        error = shortage(nearest.message, nearest.num_bytes, nearest.sizes)
        error.hint = hint
        return error
    return PlanError(
        f"a plan fits in memory (weights, gradients and optimizer state alone are {format_bytes(missing)} more than "
        "the devices of any replica hold)",
        hint=hint,
    )


def _remedies(lineups: Sequence[Lineup], bounds: Bounds, sketches: Sketches, micro_batches: int | None) -> Iterator[str]:
    """With how much memory something would fit, and with how many devices."""
    nearest = sorted(lineups, key=lambda lineup: (max(map(bounds.shortage, lineup)), len(lineup)))[:NUM_LINEUPS]
    scale = min((_scale(lineup, sketches, micro_batches) for lineup in nearest), default=MOST)
    kinds = tuple(dict.fromkeys(device.kind for device in sketches.prices.cluster.devices))
    if scale < MOST:
        rooms = ", ".join(f"{format_bytes(round(scale * sketches.prices.costs.capacity(kind)))} of a {kind.model}" for kind in kinds)
        yield f"about {scale:.3g} times the memory, with {rooms} to fill"
    fewest = {kind.model: _fewest(kind, sketches, micro_batches) for kind in kinds}
    found = [f"{count} x {model}" for model, count in fewest.items() if count]
    if found:
        yield f"a pipeline of about {' or '.join(found)}"


def _scale(lineup: Lineup, sketches: Sketches, micro_batches: int | None) -> float:
    """How many times larger the memories would have to be for a line-up."""
    rows = sketches.num_rows / sum(team.count for team in lineup)
    low, high = 1.0, MOST
    for _ in range(8):
        middle = (low * high) ** 0.5
        if all(sketches.fits(team, rows, middle, micro_batches) for team in lineup):
            high = middle
        else:
            low = middle
    return high


def _fewest(kind: Device, sketches: Sketches, micro_batches: int | None) -> int | None:
    """How many devices of a kind hold the model as one pipeline; None where no number does."""

    def fits(number: int) -> bool:
        return sketches.fits(Team((kind,) * number, 1, 1), sketches.num_rows, 1.0, micro_batches)

    numbers = range(1, sketches.pieces.num_units + 1)
    place = bisect_left(numbers, True, key=fits)
    return numbers[place] if place < len(numbers) else None
