"""The search where the user has divided the model, by scopes or replicas that are written down: over what that leaves open.

first       the plan without a search
   | rows      for each choice of devices and each order, numbers of micro-batches, uphill from the best so far
   | rest      what may be better by its bound, where there is effort enough for all of it
   | planning  on few devices these in every order; what is computed again; the event simulation judges
Found
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale.config import Config
from whale.errors import AnnotationError, ConfigError, WhaleError
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.pipeline.placement import Placed, Seats, every_placement
from whale.planning.plan import Draft, draft_as_set
from whale.planning.verify.refused import Refused
from whale.search.arrangement import Group, Order, Team
from whale.search.bounds.scoped import ScopedBounds
from whale.search.climb import climbed
from whale.search.found import NUM_RUNNERS_UP
from whale.search.progress import Progress
from whale.search.run import effort
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
        bounds: of them.

    Attributes:
        seen: ways that were looked at, with what the objective says of them; infinite where they have no plan.
        short: those of them that do not fit in memory, with why.
    """

    prices: Prices
    config: Config
    ways: Ways
    bounds: ScopedBounds
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
            rest = self._open()
            if sum(self._effort_of(way) for _, way in rest) <= self.effort:
                for bound, way in rest:
                    if self.best is None or bound < self.best.value:
                        self._value(way)

    def unproven(self, value: float) -> list[float]:
        """The bounds below a value of the ways that were not looked at, or not with their devices in every order."""
        least: dict[Way, float] = {}
        for bound, way in self._open():
            own = replace(way, placed=())
            least[own] = min(bound, least.get(own, math.inf))
        return [bound for bound in least.values() if bound < value]

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

    def _open(self) -> list[tuple[float, Way]]:
        """What was not looked at and may be better than the best plan, by its bound, which is told; least first."""
        value = math.inf if self.best is None else self.best.value
        found = [(bound, way) for row in self.ways.rows for plain in row for bound, way in self._bounded(plain) if bound < value]
        return sorted(found, key=lambda each: each[0])

    def _bounded(self, way: Way) -> Iterator[tuple[float, Way]]:
        """What is left of a way, with its bounds: on few devices each placement by itself."""
        if way in self.seen and (self.seen[way] == math.inf and way not in self.short):
            return  # in whatever order its devices stand
        if self.ways.sizes is None:
            if way not in self.seen:
                yield self._at_least(way, self.bounds.of_any(way, 1)), way
            return
        every = [replace(way, placed=placed) for placed in self._placed(way)]
        for own in every:
            if own not in self.seen:
                yield self._at_least(way, self.bounds.of_placed(way, own.placed)), own
        if not every and way not in self.seen:
            yield self._at_least(way, self.bounds.of(way)), way

    def _at_least(self, way: Way, seconds: float) -> float:
        """What the objective says at least of a way whose step takes so long: the cheapest of its devices may be those in use."""
        cluster = self.prices.cluster
        if self.ways.sizes is not None:
            each = self.bounds.scoped(way).pipeline.num_devices
            num_used = len(way.devices) // each * each
        else:
            num_used = len(way.devices if self.best is None else self.best.draft.plan.devices)
        cheapest = sorted((cluster.by_name[name] for name in way.devices), key=cluster.price_share)[:num_used]
        team = Team(tuple(Group(device.kind) for device in cheapest), 1)
        return self.objective.at_least((team,), seconds)

    def _placed(self, way: Way) -> tuple[tuple[Placed, ...], ...]:
        """On few devices all placements of a way's replicas; empty on many, where the planner's rules say."""
        key = way.devices, way.order
        if key not in self._placements:
            is_small = len(self.prices.cluster.devices) <= COMPLETE
            taken, pipeline = self._taken(way), self.bounds.scoped(way).pipeline
            found = every_placement(taken, pipeline, prefer_intra_node=True) if is_small else ()
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
        if needed > self.effort or self._is_hopeless(way):
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

    def _is_hopeless(self, way: Way) -> bool:
        """Whether a way cannot be better by its bounds, and there are runners-up enough."""
        if self.best is None or len(self.drafts) <= NUM_RUNNERS_UP:
            return False
        return all(bound >= self.best.value for bound, _ in self._bounded(way))

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
