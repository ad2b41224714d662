"""The search where the user has divided the model, by scopes or replicas that are written down: over what that leaves open.

first       the plan without a search
   | rows      for each choice of devices and each order, numbers of micro-batches, uphill from the best so far
   | rest      what else promises to be better, as far as the effort goes
   | planning  on few devices these in every order; what is computed again; the event simulation judges
Found
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale.config import Config
from whale.errors import AnnotationError, ConfigError, WhaleError
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.pipeline.placement import Placed, Seats, every_placement, placements
from whale.planning.plan import Draft, draft_as_set
from whale.planning.verify.refused import Refused
from whale.search.arrangement import Group, Order, Team
from whale.search.climb import climbed
from whale.search.found import NUM_RUNNERS_UP
from whale.search.progress import Progress
from whale.search.run import effort
from whale.search.sketch.scoped import ScopedSketches
from whale.search.sketch.sketch import PLAIN
from whale.search.space.space import COMPLETE
from whale.search.space.ways import Way, Ways


def is_divided(graph: ModelGraph, config: Config) -> bool:
    """Whether scopes, or replicas that are written down, say how a model is divided."""
    return bool(config.replicas) or any(op.scope for op in graph.ops)


@dataclass(eq=False, kw_only=True)
class DividedRun(Progress):
    """A search over the ways that are left.

    Args:
        prices: of the graph on the cluster.
        config: settings.
        ways: there are.
        sketches: of them.

    Attributes:
        seen: ways that were looked at, with what the objective says of them; infinite where they have no plan.
        short: those of them that do not fit in memory, with why.
    """

    prices: Prices
    config: Config
    ways: Ways
    sketches: ScopedSketches
    seen: dict[Way, float] = field(default_factory=dict, init=False)
    short: dict[Way, MemoryShortage] = field(default_factory=dict, init=False)
    _placements: dict[tuple[tuple[str, ...], Order | None], tuple[tuple[Placed, ...], ...]] = field(default_factory=dict, init=False)

    def look(self) -> None:
        """Plans one way after another, as far as the effort goes.

        Raises:
            WhaleError: what is set can be honoured in no way.
        """
        self._first()
        with self.kept():
            for row in self.ways.rows:
                self._climb(row)
            for way in self._rest():
                self._value(way)

    def nearest(self) -> tuple[MemoryShortage, int] | None:
        """Why the way that comes nearest does not fit, and how many bytes more of each device it needs; None where that is not the reason.

        The planner's closed forms may be a little below the estimate, so it is planned once more with as much memory as they ask for.
        """
        if not self.short:
            return None
        way, fault = min(self.short.items(), key=lambda each: each[1].num_bytes)
        missing, kinds = fault.num_bytes, {device.kind for device in self.prices.cluster.devices}
        try:
            self._draft(way, self.prices.sparing(dict.fromkeys(kinds, -missing)))
        except Refused as refused:
            return fault, max(missing, refused.num_bytes)
        except WhaleError:
            pass
        return fault, missing

    def _rest(self) -> list[Way]:
        """What was not looked at, what promises most first: on few devices each placement by itself."""
        found = list[Way]()
        for plain in (way for row in self.ways.rows for way in row):
            if self.seen.get(plain) == math.inf and plain not in self.short:
                continue  # in whatever order its devices stand
            is_small = self.ways.sizes is not None and len(self.prices.cluster.devices) <= COMPLETE
            every = [replace(plain, placed=placed) for placed in self._placed(plain)] if is_small else [plain]
            found += [way for way in every if way not in self.seen]
        return sorted(found, key=self._likely)

    def _likely(self, way: Way) -> float:
        """What the objective roughly says of a way, with its devices in the best order; 0 where replicas are written down."""
        if self.ways.sizes is None:
            return 0.0
        every = (way.placed,) if way.placed else self._placed(way)
        return min(self._likely_placed(way, placed) for placed in every)

    def _likely_placed(self, way: Way, placed: tuple[Placed, ...]) -> float:
        devices = self.prices.cluster.by_name
        team = Team(tuple(Group(devices[name].kind) for replica in placed for names in replica for name in names), 1)
        (found,) = self.objective.likely((team,), way.order or PLAIN, (way.num_micro_batch,), (self.sketches.seconds(way, placed),))
        return found

    def _placed(self, way: Way) -> tuple[tuple[Placed, ...], ...]:
        """Placements of a way's replicas: on few devices all that there are, on many kinds along the pipeline in every order."""
        key = way.devices, way.order
        if key not in self._placements:
            taken, pipeline = self._taken(way), self.sketches.scoped(way).pipeline
            found = tuple(every_placement(taken, pipeline, prefer_intra_node=True))
            found = found or placements(taken, pipeline, [0.0] * pipeline.num_ranks, None, prefer_intra_node=True)
            self._placements[key] = tuple(placement.replicas for placement in found)
        return self._placements[key]

    def _first(self) -> None:
        """The plan without a search: none that is found is worse."""
        try:
            draft = draft_as_set(self.prices, self.config, self.ways.num_rows)
        except (AnnotationError, ConfigError):
            raise
        except WhaleError as fault:
            self.faults.append(fault)
            if isinstance(fault, MemoryShortage):
                self.short[self.ways.first] = fault
            return
        self.takes_apart = bool(draft.reasons)
        own = self.add(self.ways.used(self.ways.first, draft.plan.devices), draft)
        if self.ways.sizes is None:  # nothing else is to be ordered
            self.seen[self.ways.first] = own.value

    def _climb(self, row: Sequence[Way]) -> None:
        """Plans the ways of a row from the best number of micro-batches so far, on to where the neighbours are no better."""
        numbers = [way.num_micro_batch for way in row]
        start = self.best.arrangement.num_micro_batch if self.best is not None else 1
        place = numbers.index(start) if start in numbers else 0
        climbed(len(row), place, lambda index: self._value(row[index]), lambda index: row[index] in self.short)

    def _value(self, way: Way) -> float:
        """What the objective says of a way; infinite where it has no plan, or there is no effort left for it."""
        if way in self.seen:
            return self.seen[way]
        needed = self._effort_of(way)
        if needed > self.effort or self._is_hopeless(way, needed):
            return math.inf
        self.effort -= needed
        self.seen[way] = math.inf
        try:
            draft = self._draft(way, self.prices)
        except WhaleError as fault:
            self.faults.append(fault)
            if isinstance(fault, MemoryShortage):
                self.short[way] = fault
            return math.inf
        own = self.add(self.ways.used(way, draft.plan.devices), draft)
        if draft.reasons and not self.takes_apart:
            return math.inf
        self.seen[way] = own.value
        self.seen[replace(way, placed=draft.outcome.found.best.placement.replicas)] = self.seen[way]
        self.tell_all()
        return self.seen[way]

    def _is_hopeless(self, way: Way, needed: float) -> bool:
        """Whether a way seems to be far from the best plan, and there are runners-up enough."""
        return self.best is not None and len(self.drafts) > NUM_RUNNERS_UP and self._likely(way) > self.reach(needed)

    def _draft(self, way: Way, prices: Prices) -> Draft:
        seats = Seats(prices.cluster, self._taken(way), in_any_order=True, stated=way.placed)
        return draft_as_set(prices, way.settings(self.config), self.ways.num_rows, seats)

    def _taken(self, way: Way) -> Cluster:
        return self.prices.cluster.only(way.devices)

    def _effort_of(self, way: Way) -> float:
        return effort(len(way.devices), self._num_stages * way.num_micro_batch, is_split=self._is_split)

    @property
    def _num_stages(self) -> int:
        return 1 if self.best is None else len(self.best.draft.plan.replicas[0].stages)

    @cached_property
    def _is_split(self) -> bool:
        scopes = {scope.kind for op in self.prices.graph.ops for scope in op.scope}
        return "split" in scopes or any(block.split not in (None, 1) for block in self.config.replicas)
