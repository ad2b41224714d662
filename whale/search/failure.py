"""Why a search finds no plan, and what would help: how much more memory, or how many devices.

Each setting of the user, and the division of the model, is removed in turn, and the rest is tried.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whale.config import Config
from whale.config.keys import choice_text
from whale.config.replicas import REPLICAS
from whale.errors import ConfigError, OutOfMemory, WhaleError
from whale.estimate.prices.budget import Budget
from whale.ir.cluster import Device
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.balance import MemoryShortage, shortage
from whale.planning.shard.space import NothingToCut
from whale.planning.strategy import RankSpec, ReplicaSpec, Strategy
from whale.planning.verify.refused import Refused
from whale.search.open import OpenSpace
from whale.search.ranking import FreeSpace
from whale.units import counted, format_bytes

NUM_NEAREST = 24  # sets of replicas, the closest to fitting, whose memory need is worked out: a limit of the hint, on which no plan depends

MOST = 64.0  # largest multiple of the memory that is named: a limit of the hint, on which no plan depends


def failure(
    faults: Sequence[WhaleError], short: Sequence[tuple[Strategy, MemoryShortage]], space: FreeSpace | OpenSpace, free: FreeSpace
) -> WhaleError:
    """The error for a search without a plan.

    Args:
        faults: of the plans that were tried.
        short: strategies that did not fit on devices, with why.
        space: that was searched.
        free: the space if nothing divided the model.
    """
    error = _of_devices(faults, short, space, free)
    on_hosts = next((fault for fault in faults if isinstance(fault, OutOfMemory) and not isinstance(fault, MemoryShortage)), None)
    if short and on_hosts is not None:  # more memory on devices is then not all that would help
        error.hint = f"{error.hint}; or more memory on hosts, for a plan that fits on devices:\n{on_hosts}"
    return error


def _of_devices(
    faults: Sequence[WhaleError], short: Sequence[tuple[Strategy, MemoryShortage]], space: FreeSpace | OpenSpace, free: FreeSpace
) -> WhaleError:
    """The same, where devices have too little memory, or something else than memory is in the way."""
    remedies = _Remedies(free)
    if isinstance(space, OpenSpace):
        if not short:
            return faults[0]
        strategy, nearest = min(short, key=lambda each: each[1].num_bytes)
        error = shortage(nearest.message, nearest.num_bytes, nearest.sizes)
        error.hint = f"use devices with {format_bytes(_missing(strategy, nearest, space))} more usable memory"
        undivided = "" if remedies.fits(1.0) else ", or ".join(remedies.all())
        error.hint += f"; or, without that division, {undivided}" if undivided else ""
        return error
    if faults and not short:
        return commonest(faults)
    hint = "; or ".join(remedies.all()) or "use devices with more memory, or more devices"
    if short:
        nearest = min((fault for _, fault in short), key=lambda fault: fault.num_bytes)
        error = shortage(nearest.message, nearest.num_bytes, nearest.sizes)
        error.hint = hint
        return error
    if not remedies.missing:
        return _nothing(free, remedies.lineups)
    return OutOfMemory(
        f"out of memory: weights, gradients and optimizer state alone exceed the memory of any replica's devices by "
        f"{format_bytes(remedies.missing)}",
        hint=hint,
    )


def is_lack_of_memory(
    faults: Sequence[WhaleError], short: Sequence[tuple[Strategy, MemoryShortage]], space: FreeSpace | OpenSpace, free: FreeSpace
) -> bool:
    """Whether `failure` is an OutOfMemory; arguments as there."""
    if faults and not short:
        return isinstance(faults[0] if isinstance(space, OpenSpace) else commonest(faults), OutOfMemory)
    return bool(short or _Remedies(free).missing)


def commonest(faults: Sequence[WhaleError]) -> WhaleError:
    """The first fault of the most frequent type and line; faults of splits, which the search itself tries, come last."""
    own = [fault for fault in faults if not isinstance(fault, NothingToCut)] or faults
    counts = Counter((type(fault), str(fault.where)) for fault in own)
    return max(own, key=lambda fault: counts[type(fault), str(fault.where)])


def _missing(strategy: Strategy, nearest: MemoryShortage, space: OpenSpace) -> int:
    """How many more bytes each device needs for a strategy.

    The planner's closed form may be a little below the estimate, so it is planned once more with that much memory.
    """
    missing = nearest.num_bytes
    kinds = {device.kind for device in space.prices.cluster.devices}
    try:
        space.realize(strategy, dict.fromkeys(kinds, -missing))
    except Refused as refused:
        return max(missing, refused.num_bytes)
    except WhaleError:
        pass
    return missing


def _nothing(free: FreeSpace, lineups: Sequence[Strategy]) -> ConfigError:
    """Why a space has no strategy, with its numbers."""
    space = free.space
    freedom, num_devices = space.freedom, len(space.cluster.devices)
    stages = f"{space.num_places} at most, asked for: {freedom.num_ranks or 'any number'}"
    if not lineups:
        return ConfigError(f"the model has too few places to cut for the stages of a replica ({stages}; devices: {num_devices})")
    fewest = min(strategy.num_replicas for strategy in lineups)
    if fewest * (freedom.micro_batches or 1) > space.num_rows:
        return ConfigError(
            f"too few rows for the micro-batches (rows: {space.num_rows}; replicas: {fewest} or more, on "
            f"{counted(num_devices, 'device')}; micro-batches: {freedom.micro_batches or '1 or more'})"
        )
    chunks = min(order.num_chunks for order in freedom.orders)
    return ConfigError(f"the model has too few places to cut (stages: {stages}; chunks of each device: {chunks} or more)")


class _Remedies:
    """What would help where nothing fits."""

    def __init__(self, free: FreeSpace) -> None:
        self._free, self._forms = free, free.forms
        self.lineups = list(free.space.lineups(free.alone))
        fewest = free.freedom.micro_batches or 1
        lacking = {own: max(free.forms.shortage(replica, fewest) for replica in own.replicas) for own in self.lineups}
        self.missing = min(lacking.values(), default=0)
        self._nearest = sorted(self.lineups, key=lambda strategy: (lacking[strategy], len(strategy.replicas)))[:NUM_NEAREST]

    def all(self) -> Iterator[str]:
        """How much memory, and how many devices, would make something fit."""
        scale, cluster = self._scale(), self._free.space.cluster
        kinds = tuple(dict.fromkeys(device.kind for device in cluster.devices))
        if scale < MOST:
            costs = self._forms.planner.prices.costs
            rooms = ", ".join(f"{format_bytes(round(scale * costs.capacity(kind)))} of a {kind.model}" for kind in kinds)
            yield f"about {scale:.3g} times the memory ({rooms} usable)"
        fewest = {kind.model: self._fewest(kind) for kind in kinds}
        found = [f"{number} x {model}" for model, number in fewest.items() if number]
        if found:
            yield f"a pipeline of about {' or '.join(found)}"

    def fits(self, scale: float) -> bool:
        """Whether something would roughly fit in memories `scale` times larger."""
        return any(
            all(self._holds(replica, self._forms.num_rows / strategy.num_replicas, scale) for replica in strategy.replicas)
            for strategy in self._nearest
        )

    def _holds(self, replica: ReplicaSpec, rows: float, scale: float) -> bool:
        """Whether one replica with so many rows would fit in memories `scale` times larger, whatever devices exist."""
        m = self._free.freedom.micro_batches or max(1, int(rows))
        own = replace(replica, num_micro_batch=m, schedule=replica.schedule or "1f1b", num_chunks=replica.num_chunks or 1)
        return any(self._takes_all(own, max(1, math.ceil(rows / m)), scale, policy) for policy in ("none", "auto"))

    def _takes_all(self, replica: ReplicaSpec, rows: int, scale: float, policy: str) -> bool:
        """The same, where each stage in turn takes as much of the model as fits."""
        planner, place = self._forms.planner, 0
        pricing = replace(planner.pricing, budget=Budget(sums_at_once=replica.num_micro_batch == 1))
        solver, num_units = planner.solver(replica, policy, pricing), planner.points.num_units
        for stage, rank in enumerate(solver.pipeline.stage_rank):
            ends = np.arange(place + 1, num_units + 1)
            room = scale * planner.prices.room((replica.ranks or ())[rank].kind) / solver.pipeline.num_chunks
            own = (replica.ranks or ())[rank]
            held = solver.tables.held(stage, own.kind, own.width, rows, np.array(place), ends)
            reach = int(np.searchsorted(held, room, side="right"))
            if not reach:
                return place == num_units
            place += reach
        return place == num_units

    def _scale(self) -> float:
        """How many times larger the memories must be, by bisection."""
        low, high = 1.0, MOST
        for _ in range(8):
            middle = (low * high) ** 0.5
            if self.fits(middle):
                high = middle
            else:
                low = middle
        return high

    def _fewest(self, kind: Device) -> int | None:
        """How many devices of a type hold the model as one pipeline, no deeper than configured; None where no number does."""
        most, asked = self._free.space.num_places, self._free.freedom.num_ranks
        numbers = range(1, min(most, asked or most) + 1)

        def fits(number: int) -> bool:
            return self._holds(ReplicaSpec((RankSpec(kind),) * number), self._forms.num_rows, 1.0)

        place = bisect_left(numbers, True, key=fits)
        return numbers[place] if place < len(numbers) else None


PINS = (
    ("pipeline.num_stages",),
    ("pipeline.num_micro_batch",),
    ("pipeline.schedule", "pipeline.num_chunks", "pipeline.group_size"),
    ("recompute.policy",),
    ("memory.fraction",),
    ("planning.search",),
)
"""Settings that may rule out every plan; those of a line are removed together."""

EFFORT = 2  # plans to see whether there is one, and six more while nothing fits: whether, not which, is asked


def with_blame(fault: WhaleError, graph: ModelGraph, config: Config, planned: Callable[[ModelGraph, Config], object]) -> WhaleError:
    """Adds to a fault's hint the settings, or the division of the model, without which there is a plan.

    Args:
        fault: why there is no plan.
        graph: the captured model.
        config: all settings.
        planned: makes a plan of a model with other settings, or raises a `WhaleError`.
    """
    found = [
        f"without {words} there is a plan" for words, other, left in _without(fault, graph, config) if _is_planned(planned, other, left)
    ]
    if found:
        fault.hint = "; ".join([*filter(None, [fault.hint]), *found])
    return fault


def _is_planned(planned: Callable[[ModelGraph, Config], object], graph: ModelGraph, config: Config) -> bool:
    try:
        planned(graph, config.with_values({"planning.effort": EFFORT}))
    except WhaleError:
        return False
    return True


def _without(fault: WhaleError, graph: ModelGraph, config: Config) -> Iterator[tuple[str, ModelGraph, Config]]:
    """What may be to blame, in words, with the model and settings that are left without it."""
    for pins in PINS:
        own = {name: value for name, value in config.explicit_items() if name in pins}
        if own:
            yield " and ".join(f"{name} ({_text(value)})" for name, value in own.items()), graph, _left(config, tuple(own))
    is_scoped = any(op.scope for op in graph.ops)
    division = [*(["the scopes"] if is_scoped else []), *(["the replicas that are written down"] if config.replicas else [])]
    if division and not isinstance(fault, ConfigError):  # that says what is wrong in the division itself
        plain = replace(graph, ops=tuple(replace(op, scope=()) for op in graph.ops))
        yield " and ".join(division), plain, _left(config, (REPLICAS,))


def _text(value: Any) -> str:
    return choice_text(value) if isinstance(value, tuple) else str(value)


def _left(config: Config, names: Sequence[str]) -> Config:
    return Config({name: value for name, value in config.explicit_items() if name not in names})
