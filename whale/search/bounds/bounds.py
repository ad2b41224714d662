"""What no plan of an arrangement can beat, in closed form: each op runs somewhere, each gradient is summed, each weight is updated.

one team         its replicas have the mean of the rows             `whale.search.bounds.replicas`
several teams    the least time within which all rows are taken     `whale.search.bounds.shares`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.structure.structure import Structure
from whale.search.arrangement import Arrangement, Order, Team
from whale.search.bounds.columns import Columns, columns_of
from whale.search.bounds.replicas import Asked, Replicas
from whale.search.bounds.shares import Shares
from whale.search.bounds.summing import Sums
from whale.search.bounds.waiting import NO_ORDER, first_alike


@dataclass(eq=False)
class Bounds:
    """Bounds of the arrangements of one graph on one cluster.

    Args:
        prices: of the graph on the cluster.
        structure: of the graph.
        points: where it can be cut.
        num_rows: of the global batch.
    """

    prices: Prices
    structure: Structure
    points: CutPoints
    num_rows: int
    _found: dict[tuple[tuple[Team, ...], Order, int], float] = field(default_factory=dict, init=False)

    @cached_property
    def columns(self) -> Columns:
        """The ops."""
        return columns_of(self.prices, self.structure)

    @cached_property
    def parameter_bytes(self) -> int:
        """Of all parameters, with what training keeps beside them."""
        return sum(self.prices.parameter_bytes(parameter.name) for parameter in self.prices.graph.parameters)

    def shortage(self, team: Team) -> int:
        """Bytes by which the parameters alone overflow a replica of this team; 0 where they fit."""
        room = sum(self.prices.costs.capacity(kind) * number for kind, number in team.one.taken.items())
        return max(0, self.parameter_bytes - room)

    @cached_property
    def _replicas(self) -> Replicas:
        return Replicas(self.prices, self.columns, self.points, self.num_rows)

    @cached_property
    def _sums(self) -> Sums:
        return Sums(self.prices.cluster)

    @cached_property
    def _shares(self) -> Shares:
        return Shares(self._replicas, self._sums, self.num_rows)

    def of(self, arrangements: Sequence[Arrangement]) -> list[float]:
        """Seconds that a step of any plan of each arrangement takes at least."""
        return self._least((each.teams, each.order, each.num_micro_batch) for each in arrangements)

    def of_lineups(self, asked: Iterable[tuple[tuple[Team, ...], int]]) -> list[float]:
        """Seconds that a step of each of these replicas takes at least in any order, with so many micro-batches or more."""
        return self._least((teams, NO_ORDER, num_micro_batch) for teams, num_micro_batch in asked)

    def _least(self, wanted: Iterable[tuple[tuple[Team, ...], Order, int]]) -> list[float]:
        keys = [(teams, first_alike(order, max(team.num_ranks for team in teams), m), m) for teams, order, m in wanted]
        new = [key for key in dict.fromkeys(keys) if key not in self._found]
        one, several = [key for key in new if len(key[0]) == 1], [key for key in new if len(key[0]) > 1]
        alone = [Asked.of(team, order, m, (self.num_rows / team.count,), self._sums.of(teams)) for teams, order, m in one for team in teams]
        self._found.update(zip(one, (float(seconds[0]) for seconds in self._replicas.seconds(alone)), strict=True))
        self._found.update(zip(several, self._shares.seconds(several), strict=True))
        return [self._found[key] for key in keys]

    def share_of(self, team: Team) -> float:
        """Rows that a replica of a team would take if all devices of the cluster took as many as they are fast."""
        return self.num_rows * sum(self._speeds[kind] * number for kind, number in team.one.taken.items())

    @cached_property
    def _speeds(self) -> Mapping[Device, float]:
        """Per kind, the share of one device in the speed of all."""
        counts = Counter(device.kind for device in self.prices.cluster.devices)
        speeds = {kind: 1 / self._work(kind, self.num_rows) for kind in counts}
        total = sum(speeds[kind] * count for kind, count in counts.items())
        return {kind: speed / total for kind, speed in speeds.items()}

    def alone(self, asked: Iterable[tuple[Team, Order, int]]) -> list[float]:
        """`of` for teams of several, each with the rows of its share and so many micro-batches."""
        own = [Asked.of(team, order, m, (max(self.share_of(team), m),), self._sums.of((team,))) for team, order, m in asked]
        return [float(seconds[0]) for seconds in self._replicas.seconds(own)]

    def about_alone(self, team: Team, order: Order, num_micro_batch: int) -> float:
        """About what `alone` comes to at least, of a team of one kind whose ops are all cut alike; quickly worked out."""
        rows = max(self.share_of(team), num_micro_batch) / num_micro_batch
        whole, ranks = self._work(team.ranks[0].kind, rows) / team.ranks[0].width, team.num_ranks
        if ranks == 1 or not order.fills:
            return num_micro_batch * whole / ranks
        return whole / (1 - (1 - 1 / num_micro_batch) ** ranks)  # the ranks before each fill and drain the pipeline

    def _work(self, kind: Device, rows: float) -> float:
        times = self.columns.seconds(kind, float(rows))
        return float((times.forward + times.backward) @ self.columns.counts)
