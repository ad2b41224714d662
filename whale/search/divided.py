"""The search where the user has divided the model, by scopes or replicas that are written down: over what that leaves open.

first       the plan without a search
   | rows      for each choice of devices, numbers of micro-batches, uphill from the best so far
   | planning  devices in every order; what is computed again; the event simulation judges
Found
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.config import Config
from whale.errors import AnnotationError, ConfigError, WhaleError
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.pipeline.placement import Seats
from whale.planning.plan import Draft, draft_as_set
from whale.search.climb import climbed
from whale.search.progress import Progress
from whale.search.run import effort
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

    Attributes:
        seen: ways that were looked at, with what the objective says of them; infinite where they have no plan.
        short: those of them that do not fit in memory.
        is_together: whether the plan without a search keeps samples that depend on one another together; then all others do.
    """

    prices: Prices
    config: Config
    ways: Ways
    seen: dict[Way, float] = field(default_factory=dict, init=False)
    short: set[Way] = field(default_factory=set, init=False)
    is_together: bool = field(default=False, init=False)

    def look(self) -> None:
        """Plans one way after another, as far as the effort goes.

        Raises:
            WhaleError: what is set can be honoured in no way.
        """
        self._first()
        with self.kept():
            for row in self.ways.rows():
                self._climb(row)

    @property
    def num_open(self) -> int:
        """Ways that were not looked at."""
        return self.num_arrangements - len(self.seen)

    def _first(self) -> None:
        """The plan without a search: none that is found is worse."""
        try:
            draft = draft_as_set(self.prices, self.config, self.ways.num_rows)
        except (AnnotationError, ConfigError):
            raise
        except WhaleError as fault:
            self.faults.append(fault)
            return
        self.is_together = not draft.reasons
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
        needed = effort(len(way.devices), self._num_stages * way.num_micro_batch, is_split=self._is_split)
        if needed > self.effort:
            return math.inf
        self.effort -= needed
        self.seen[way] = math.inf
        try:
            draft = self._draft(way)
        except WhaleError as fault:
            self.faults.append(fault)
            if isinstance(fault, MemoryShortage):
                self.short.add(way)
            return math.inf
        if draft.reasons and self.is_together:
            return math.inf
        self.seen[way] = self.add(self.ways.used(way, draft.plan.devices), draft).value
        self.tell_all()
        return self.seen[way]

    def _draft(self, way: Way) -> Draft:
        cluster = self.prices.cluster
        seats = Seats(cluster, cluster.only(way.devices), in_any_order=True)
        return draft_as_set(self.prices, way.settings(self.config), self.ways.num_rows, seats)

    @property
    def _num_stages(self) -> int:
        return 1 if self.best is None else len(self.best.draft.plan.replicas[0].stages)

    @cached_property
    def _is_split(self) -> bool:
        scopes = {scope.kind for op in self.prices.graph.ops for scope in op.scope}
        return "split" in scopes or any(block.split not in (None, 1) for block in self.config.replicas)
