"""Where one model may be cut, and what its pieces cost, for all pipelines, policies and budgets; each is found once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.prices import Prices
from whale.planning.cutting.pieces import Pieces
from whale.planning.pipeline.cut_points import CutPoints, find_cut_points
from whale.planning.pipeline.recompute import KEEP_ALL, Policy, kept_under
from whale.planning.shard.sharding import Sharder
from whale.planning.structure.structure import Structure, analyse


@dataclass(eq=False)
class Cuts:
    """The cuts of one graph on one cluster, for batches of one size."""

    prices: Prices
    num_rows: int
    _points: dict[tuple[str, tuple[tuple[str, str], ...], Budget], CutPoints] = field(default_factory=dict, init=False)
    _pieces: dict[Budget, Pieces] = field(default_factory=dict, init=False)

    @cached_property
    def structure(self) -> Structure:
        """What stays together in any cut."""
        return analyse(self.prices.graph)

    def points(self, policy: Policy = KEEP_ALL, budget: Budget = ALL) -> CutPoints:
        """Where the model can be cut, with what its pieces hold under a policy."""
        key = policy.kind, policy.modules, _keeping(budget)
        if key not in self._points:
            self._points[key] = find_cut_points(self.structure, self.prices, kept_under(self.prices, policy), key[-1])
        return self._points[key]

    def pieces(self, budget: Budget = ALL) -> Pieces:
        """The same without recomputation, with seconds, and with bytes of split groups."""
        own = _keeping(budget)
        if own not in self._pieces:
            self._pieces[own] = Pieces(self.prices, self.points(budget=own), self.num_rows, own, self._sharder)
        return self._pieces[own]

    @cached_property
    def _sharder(self) -> Sharder:
        return Sharder(self.prices)


def _keeping(budget: Budget) -> Budget:
    """What cuts depend on of a budget."""
    return replace(budget, reserved=frozenset(), is_alone=False)
