"""What no plan of an arrangement can beat, in closed form: each op runs somewhere, each gradient is summed, each weight is updated.

Let t_s be the time of rank s for one micro-batch, over all its chunks. A step takes at least, for every rank s,

    pipeline    m t_s + f x (t_1 + ... + t_s-1)               f = 1: the ranks before it fill and drain; 0 where chunks take turns
    end         m t_s - B_s + sync_s + update_s               B_s: the last backward pass, behind which the sums may hide

so also any mean of these over the ranks, with weights of our choice. In a mean each op has a price per rank, and whatever
the cut it pays at least the least of them: the bound is the sum of that over the ops. With weights that make equal shares of the
work equally dear it is the time of a cut without grain. Ops that cost the same are one column, counted as often as they occur.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from whale.estimate import OpTable, op_seconds, optimizer_seconds
from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.planning.structure.structure import Structure
from whale.search.arrangement import Arrangement, Order, Team

GRID = 64
"""Rows of a replica are looked at in about so many steps where teams divide them."""


@dataclass(frozen=True)
class Columns:
    """The ops of a graph that run in every replica, equal ones together.

    Attributes:
        table: the figures of one of each.
        counts: how many there are.
        trained: bytes of trainable parameters that it is the first to read.
    """

    table: OpTable
    counts: Floats
    trained: Floats


def columns_of(prices: Prices, structure: Structure) -> Columns:
    """Reduces a graph to its columns."""
    graph, table = prices.graph, prices.table
    trained = np.zeros(len(graph.ops))
    names = set[str]()
    for op in graph.ops:
        for source in op.inputs if op.name in structure.atom_of else ():
            read = graph.by_name[source]
            if read.kind == "parameter" and (parameter := graph.parameter_by_name[read.target]).name not in names:
                names.add(parameter.name)
                trained[table.position[op.name]] += parameter.spec.num_bytes * parameter.trainable
    own = np.array([table.position[name] for name in structure.atom_of], dtype=np.int64)
    arrays = {
        each.name: getattr(table, each.name) for each in dataclasses.fields(table) if isinstance(getattr(table, each.name), np.ndarray)
    }
    looks = np.stack([*(values[own].astype(np.float64) for values in arrays.values()), trained[own]], axis=1)
    _, first, counts = np.unique(looks, axis=0, return_index=True, return_counts=True)
    kept = own[first]
    return Columns(
        dataclasses.replace(table, **{name: values[kept] for name, values in arrays.items()}), counts.astype(float), trained[kept]
    )


@dataclass(eq=False)
class Bounds:
    """Bounds of the arrangements of one graph on one cluster.

    Args:
        prices: of the graph on the cluster.
        structure: of the graph.
        num_rows: of the global batch.
    """

    prices: Prices
    structure: Structure
    num_rows: int
    _seconds: dict[tuple[Device, int, tuple[float, ...]], tuple[Floats, Floats]] = field(default_factory=dict, init=False)
    _curves: dict[tuple[Team, Order, int, float], Floats] = field(default_factory=dict, init=False)

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
        return max(0, self.parameter_bytes - sum(self.prices.costs.capacity(kind) for kind in team.kinds) * team.width)

    def of(self, arrangement: Arrangement) -> float:
        """Seconds that a step of any plan of this arrangement takes at least."""
        order, m = arrangement.order, arrangement.num_micro_batch
        rate = self._sync_rate(arrangement.num_replicas, num_hosts(arrangement.teams, self.prices.cluster))
        if len(arrangement.teams) == 1:
            rows = (self.num_rows / arrangement.num_replicas,)
            return float(self._team_seconds(arrangement.teams[0], order, m, rows, rate)[0])
        curves = [self._curve(team, order, m, rate) for team in arrangement.teams]
        counts = [team.count for team in arrangement.teams]
        times = np.unique(np.concatenate(curves))
        taken = sum(count * self._rows_within(curve, times) for count, curve in zip(counts, curves, strict=True))
        floor = max(float(curve[np.searchsorted(self._grid, m)]) for curve in curves)
        return max(floor, float(times[min(int(np.searchsorted(taken, self.num_rows)), len(times) - 1)]))

    def share_of(self, team: Team) -> float:
        """Rows that a replica of a team would take if all devices of the cluster took as many as they are fast."""
        speeds = {
            kind: float((1 / self._work(kind, self.num_rows)).item()) for kind in {device.kind for device in self.prices.cluster.devices}
        }
        total = sum(speeds[device.kind] for device in self.prices.cluster.devices)
        return self.num_rows * team.width * sum(speeds[kind] for kind in team.kinds) / total

    def alone(self, team: Team, order: Order, num_micro_batch: int) -> float:
        """`of` for one team of several, with the rows of its share."""
        rate = self._sync_rate(team.count, num_hosts((team,), self.prices.cluster))
        return float(self._team_seconds(team, order, num_micro_batch, (max(self.share_of(team), num_micro_batch),), rate)[0])

    def _work(self, kind: Device, rows: float) -> Floats:
        forward, backward = self._ops(kind, 1, (float(rows),))
        result: Floats = (forward + backward) @ self.columns.counts
        return result

    @cached_property
    def _grid(self) -> Floats:
        """Numbers of rows of a replica: all, where they are few."""
        steps = np.geomspace(1, self.num_rows, GRID) if self.num_rows > GRID else np.arange(1, self.num_rows + 1)
        result: Floats = np.unique(np.concatenate((steps, 2.0 ** np.arange(self.num_rows.bit_length()))))
        return result

    def _rows_within(self, curve: Floats, times: Floats) -> Floats:
        """At most so many rows does a replica compute within each of these times: the next step of the grid is too much."""
        index = np.searchsorted(curve, times * (1 + 1e-12), side="right")
        if self.num_rows <= GRID:
            return np.concatenate(([0.0], self._grid))[index]
        return np.concatenate((self._grid, self._grid[-1:]))[index]

    def _curve(self, team: Team, order: Order, num_micro_batch: int, sync_rate: float) -> Floats:
        """`_team_seconds` over the grid, made to not fall."""
        key = dataclasses.replace(team, count=1), order, num_micro_batch, sync_rate
        if key not in self._curves:
            found = self._team_seconds(team, order, num_micro_batch, tuple(self._grid), sync_rate)
            self._curves[key] = np.maximum.accumulate(found)
        return self._curves[key]

    def _ops(self, kind: Device, num_micro_batch: int, rows: tuple[float, ...]) -> tuple[Floats, Floats]:
        """Seconds of every column forward and backward, ``[rows, columns]``, for one micro-batch of a replica with these rows."""
        key = kind, num_micro_batch, rows
        if key not in self._seconds:
            found = np.zeros((2, len(rows), len(self.columns.counts)))
            for index, number in enumerate(rows):
                taken = number / num_micro_batch
                seconds = op_seconds(self.columns.table, kind, taken, self.prices.costs)
                found[0, index] = seconds.forward_fixed + taken * seconds.forward_per_row
                if self.prices.training:
                    found[1, index] = seconds.backward_fixed + taken * seconds.backward_per_row
            self._seconds[key] = found[0], found[1]
        return self._seconds[key]

    def _team_seconds(self, team: Team, order: Order, num_micro_batch: int, rows: tuple[float, ...], sync_rate: float) -> Floats:
        """The bound for replicas of a team with so many rows each, per number of rows."""
        kinds = dict.fromkeys(team.kinds)
        ops = {kind: tuple(each / team.width for each in self._ops(kind, num_micro_batch, rows)) for kind in kinds}
        both = {kind: forward + backward for kind, (forward, backward) in ops.items()}
        fills = order.num_chunks == 1 and order.schedule in ("1f1b", "gpipe")
        found = self._pipeline(team.kinds, both, num_micro_batch, fill=float(fills))
        if not self.prices.training:
            return found
        hidden = {kind: backward if fills else 0.0 * backward for kind, (_, backward) in ops.items()}
        return np.maximum(found, self._end(team, both, hidden, num_micro_batch, sync_rate if fills else 0.0))

    def _pipeline(self, ranks: Sequence[Device], both: Mapping[Device, Floats], num_micro_batch: int, *, fill: float) -> Floats:
        """The first bound of the module, in the mean whose weights make every rank's share of the ops equally dear."""
        counts = self.columns.counts
        wanted = {kind: 1 / (seconds @ counts) for kind, seconds in both.items()}
        after, prices = np.zeros_like(next(iter(wanted.values()))), list[Floats]()
        for kind in reversed(ranks):
            weight = np.maximum(0.0, wanted[kind] - fill * after) / num_micro_batch
            prices.append(num_micro_batch * weight + fill * after)
            after = after + weight
        least: dict[Device, Floats] = {}
        for kind, price in zip(reversed(ranks), prices, strict=True):
            least[kind] = np.minimum(least.get(kind, price), price)
        dearest = np.min([price[:, None] * both[kind] for kind, price in least.items()], axis=0)
        result: Floats = (dearest @ counts) / after
        return result

    def _end(
        self, team: Team, both: Mapping[Device, Floats], hidden: Mapping[Device, Floats], num_micro_batch: int, sync_rate: float
    ) -> Floats:
        """The second bound, likewise."""
        columns, costs = self.columns, self.prices.costs
        per_byte = {kind: (optimizer_seconds(kind, 1.0, 1.0, costs.optimizer_states) + sync_rate) / team.width for kind in both}
        priced = {kind: num_micro_batch * both[kind] - hidden[kind] + per_byte[kind] * columns.trained for kind in both}
        wanted = {kind: 1 / (seconds @ columns.counts) for kind, seconds in priced.items()}
        total = sum(wanted[kind] for kind in team.kinds)
        result: Floats = np.min([(wanted[kind] / total)[:, None] * seconds for kind, seconds in priced.items()], axis=0) @ columns.counts
        return result

    def _sync_rate(self, num_owners: int, num_hosts: int) -> float:
        """Seconds per byte of a gradient that so many devices on so many hosts add up at least, in whatever way they do.

        A device of k moves 2 (k - 1) / k of the bytes over its links; a host of H likewise, over those of all its devices.
        """
        if num_owners == 1:
            return 0.0
        cluster = self.prices.cluster
        largest = max(len(host.devices) for host in cluster.hosts)
        outside = max((link.bandwidth for link in (cluster.network, *(link for _, link in cluster.pairs)) if link is not None), default=0.0)
        inside = max((host.link.bandwidth for host in cluster.hosts if len(host.devices) > 1), default=0.0)
        rate = 2 * (num_owners - 1) / num_owners / max(inside, outside)
        return max(rate, 2 * (num_hosts - 1) / num_hosts / (largest * outside) if num_hosts > 1 else 0.0)


def num_hosts(teams: Sequence[Team], cluster: Cluster) -> int:
    """Hosts on which the replicas of these teams are at least, if of each there is a device of one of its kinds on one of them."""
    room = []
    for host in cluster.hosts:
        there = Counter(device.kind for device in host.devices)
        room.append(sum(min(team.count, sum(there[kind] for kind in set(team.kinds))) for team in teams))
    wanted, found = sum(team.count for team in teams), 0
    for number in sorted(room, reverse=True):
        if wanted <= 0:
            break
        wanted -= number
        found += 1
    return found
