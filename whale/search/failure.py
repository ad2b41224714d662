"""Why a search ends without a plan, and what would help: how much more memory, or how many devices."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from whale.errors import ConfigError, PlanError, WhaleError
from whale.ir.cluster import Device
from whale.planning.pipeline.balance import MemoryShortage, shortage
from whale.planning.shard.insisting import NothingToCut
from whale.search.arrangement import Group, Team
from whale.search.sketch.sketch import Sketches
from whale.search.space.space import Lineup, Space
from whale.units import counted, format_bytes

NUM_LINEUPS = 24
"""Of so many line-ups, those that come nearest, it is worked out how much memory they would need."""

MOST = 64.0
"""Memories are not imagined larger than so many times."""


def failure(faults: Sequence[WhaleError], space: Space, lineups: Sequence[Lineup], sketches: Sketches) -> WhaleError:
    """The error that says it.

    Args:
        faults: of the plans that were tried.
        space: that was searched.
        lineups: of the space.
        sketches: know the bytes of the model, and what fits, roughly.
    """
    missing = min((max(map(sketches.shortage, lineup)) for lineup in lineups), default=0)
    shortages = [fault for fault in faults if isinstance(fault, MemoryShortage)]
    if not faults and not missing:
        return _nothing(space, lineups)
    if faults and not shortages:
        return commonest(faults)
    hint = "; or ".join(_remedies(space, lineups, sketches)) or "devices with more memory, or more of them"
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


def commonest(faults: Sequence[WhaleError]) -> WhaleError:
    """The first fault that breaks the rule which most of them break; splits, which the search tries by itself, come last."""
    own = [fault for fault in faults if not isinstance(fault, NothingToCut)] or faults
    rules = Counter(_rule(fault) for fault in own)
    return max(own, key=lambda fault: rules[_rule(fault)])


def _rule(fault: WhaleError) -> str:
    """A message without its values."""
    return fault.message.partition(" (")[0]


def failure_divided(nearest: MemoryShortage, missing: int, space: Space, lineups: Sequence[Lineup], sketches: Sketches) -> WhaleError:
    """Likewise where the user has divided the model: with how much more memory it fits so, and what would hold it if it were not divided.

    Args:
        nearest: why the way that comes nearest does not fit.
        missing: bytes of each device with which it would.
        space: that there would be without scopes and replicas that are written down; `lineups` are its.
    """
    error = shortage(nearest.message, nearest.num_bytes, nearest.sizes)
    error.hint = f"devices with {format_bytes(missing)} more to fill"
    if not any(_fits(lineup, sketches, 1.0, space.freedom.micro_batches) for lineup in _nearest(lineups, sketches)):
        undivided = ", or ".join(_remedies(space, lineups, sketches))
        error.hint += f"; or without that division {undivided}" if undivided else ""
    return error


def _nothing(space: Space, lineups: Sequence[Lineup]) -> ConfigError:
    """Why a space has no arrangement, with its numbers."""
    freedom, num_devices = space.freedom, len(space.cluster.devices)
    stages = f"{space.num_places} at most, asked for: {freedom.num_ranks or 'any number'}"
    if not lineups:
        return ConfigError(f"the model can be cut into the stages of a replica ({stages}; devices: {num_devices})")
    fewest = min(sum(team.count for team in lineup) for lineup in lineups)
    if fewest * (freedom.micro_batches or 1) > space.num_rows:
        return ConfigError(
            f"every micro-batch of every replica has a row (rows: {space.num_rows}; replicas: {fewest} or more, on "
            f"{counted(num_devices, 'device')}; micro-batches: {freedom.micro_batches or '1 or more'})"
        )
    chunks = min(order.num_chunks for order in freedom.orders)
    return ConfigError(f"the model has a place to cut for every stage (stages: {stages}; chunks of each device: {chunks} or more)")


def _remedies(space: Space, lineups: Sequence[Lineup], sketches: Sketches) -> Iterator[str]:
    """With how much memory something would fit, and with how many devices."""
    scale = min((_scale(lineup, sketches, space.freedom.micro_batches) for lineup in _nearest(lineups, sketches)), default=MOST)
    kinds = tuple(dict.fromkeys(device.kind for device in space.cluster.devices))
    if scale < MOST:
        rooms = ", ".join(f"{format_bytes(round(scale * sketches.prices.costs.capacity(kind)))} of a {kind.model}" for kind in kinds)
        yield f"about {scale:.3g} times the memory, with {rooms} to fill"
    fewest = {kind.model: _fewest(kind, space, sketches) for kind in kinds}
    found = [f"{count} x {model}" for model, count in fewest.items() if count]
    if found:
        yield f"a pipeline of about {' or '.join(found)}"


def _nearest(lineups: Sequence[Lineup], sketches: Sketches) -> Sequence[Lineup]:
    """Those that lack least."""
    return sorted(lineups, key=lambda lineup: (max(map(sketches.shortage, lineup)), len(lineup)))[:NUM_LINEUPS]


def _fits(lineup: Lineup, sketches: Sketches, scale: float, micro_batches: int | None) -> bool:
    """Whether a line-up would fit, roughly, in memories that are so many times larger."""
    rows = sketches.num_rows / sum(team.count for team in lineup)
    return all(sketches.fits(team, rows, scale, micro_batches) for team in lineup)


def _scale(lineup: Lineup, sketches: Sketches, micro_batches: int | None) -> float:
    """How many times larger the memories would have to be for a line-up."""
    low, high = 1.0, MOST
    for _ in range(8):
        middle = (low * high) ** 0.5
        if _fits(lineup, sketches, middle, micro_batches):
            high = middle
        else:
            low = middle
    return high


def _fewest(kind: Device, space: Space, sketches: Sketches) -> int | None:
    """How many devices of a kind hold the model as one pipeline, no deeper than is set; None where no number does."""
    freedom = space.freedom

    def fits(number: int) -> bool:
        return sketches.fits(Team((Group(kind),) * number, 1), space.num_rows, 1.0, freedom.micro_batches)

    numbers = range(1, min(space.num_places, freedom.num_ranks or space.num_places) + 1)
    place = bisect_left(numbers, True, key=fits)
    return numbers[place] if place < len(numbers) else None
