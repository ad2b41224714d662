"""What no plan of an arrangement can beat, in closed form: each op runs somewhere, each gradient is summed, each weight is updated.

Let t_s be the time of rank s for one micro-batch, over all its chunks. A step takes at least, for every rank s,

    pipeline    m t_s + what it waits for others              `whale.search.bounds.waiting`
    end         m t_s - B_s + sync_s + update_s               B_s: the last backward pass, behind which the sums may hide;
                                                              0 where unlike pipelines sum when all is done

so also any mean of these over the ranks, with weights of our choice. In a mean each op has a price per rank, and whatever
the cut it pays at least the least of them: the bound is the sum of that over the ops. With weights that make equal shares of the
work equally dear it is the time of a cut without grain. Ops that cost the same are one column, counted as often as they occur.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from whale.estimate import optimizer_seconds
from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.structure.structure import Structure
from whale.search.arrangement import Arrangement, Group, Order, Team, sums_in_backward
from whale.search.bounds.chain import loose_runs
from whale.search.bounds.columns import Columns, columns_of
from whale.search.bounds.waiting import NO_ORDER, Pass, Passes, Pipeline, first_alike


@dataclass(frozen=True, slots=True)
class Summing:
    """How replicas sum gradients.

    Attributes:
        rate: seconds per byte that it takes at least.
        is_last: whether that begins when all else is done.
    """

    rate: float
    is_last: bool


GRID = 64
"""Rows of a replica are looked at in about so many steps where teams divide them."""


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
    _curves: dict[tuple[Team, Order, int, Summing], Floats] = field(default_factory=dict, init=False)
    _found: dict[tuple[tuple[Team, ...], Order, int], float] = field(default_factory=dict, init=False)
    _known: dict[tuple[Group, int, tuple[float, ...]], Passes] = field(default_factory=dict, init=False)

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

    def of(self, arrangement: Arrangement) -> float:
        """Seconds that a step of any plan of this arrangement takes at least."""
        teams, m = arrangement.teams, arrangement.num_micro_batch
        key = teams, first_alike(arrangement.order, max(team.num_ranks for team in teams), m), m
        if key not in self._found:
            self._found[key] = self._together(teams, arrangement.order, m, self._summing(teams))
        return self._found[key]

    def of_lineup(self, teams: Sequence[Team], num_micro_batch: int) -> float:
        """Seconds that a step of these replicas takes at least in any order, with so many micro-batches or more."""
        return self._together(teams, NO_ORDER, num_micro_batch, self._summing(teams))

    def _summing(self, teams: Sequence[Team]) -> Summing:
        rate = self._sync_rate(sum(team.count for team in teams), self._num_hosts(teams))
        return Summing(rate, is_last=not sums_in_backward(teams))

    def _together(self, teams: Sequence[Team], order: Order, m: int, summing: Summing) -> float:
        counts = [team.count for team in teams]
        if len(teams) == 1:
            return float(self._team_seconds(teams[0], order, m, (self.num_rows / counts[0],), summing)[0])
        curves = [self._curve(team, order, m, summing) for team in teams]
        times = np.unique(np.concatenate(curves))
        taken = sum(count * self._rows_within(curve, times) for count, curve in zip(counts, curves, strict=True))
        floor = max(float(curve[np.searchsorted(self._grid, m, side="right") - 1]) for curve in curves)
        return max(floor, float(times[min(int(np.searchsorted(taken, self.num_rows)), len(times) - 1)]))

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

    def alone(self, team: Team, order: Order, num_micro_batch: int) -> float:
        """`of` for one team of several, with the rows of its share."""
        rows = (max(self.share_of(team), num_micro_batch),)
        return float(self._team_seconds(team, order, num_micro_batch, rows, self._summing((team,)))[0])

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

    @cached_property
    def _grid(self) -> Floats:
        """Numbers of rows of a replica: all, where they are few."""
        few = np.arange(1, min(self.num_rows, GRID) + 1, dtype=np.float64)
        steps = 2.0 ** (np.arange(0, 8 * self.num_rows.bit_length()) / 8)  # the same for any power of two of micro-batches
        result: Floats = few if self.num_rows <= GRID else steps[steps < 2 * self.num_rows]
        return result

    @cached_property
    def _steps(self) -> tuple[float, ...]:
        return tuple(self._grid.tolist())

    def _rows_within(self, curve: Floats, times: Floats) -> Floats:
        """At most so many rows does a replica compute within each of these times: the next step of the grid is too much."""
        index = np.searchsorted(curve, times * (1 + 1e-12), side="right")
        if self.num_rows <= GRID:
            return np.concatenate(([0.0], self._grid))[index]
        return np.concatenate((self._grid, self._grid[-1:]))[index]

    def _curve(self, team: Team, order: Order, num_micro_batch: int, summing: Summing) -> Floats:
        """`_team_seconds` over the grid, made to not fall."""
        key = team.one, first_alike(order, team.num_ranks, num_micro_batch), num_micro_batch, summing
        if key not in self._curves:
            found = self._team_seconds(team, key[1], num_micro_batch, self._steps, summing)
            self._curves[key] = np.maximum.accumulate(found)
        return self._curves[key]

    def _team_seconds(self, team: Team, order: Order, num_micro_batch: int, rows: tuple[float, ...], summing: Summing) -> Floats:
        """The bound for replicas of a team with so many rows each, per number of rows."""
        passes = {rank: self._passes(rank, num_micro_batch, rows) for rank in team.numbers}
        order = first_alike(order, team.num_ranks, num_micro_batch)
        pipeline = Pipeline(team.runs, passes, self.columns.counts, num_micro_batch)
        found = pipeline.waited(order, training=self.prices.training)
        if found is None or len(self._loose):  # else hardly anything is known by what they compute alone
            computed = pipeline.computed()
            beside = 0.0 if found is None else self._beside(team.num_ranks * order.num_chunks, passes)
            found = computed if found is None else np.maximum(computed, found - beside)
        if not self.prices.training:
            return found
        ends_with_backward = order.fills or order.fills_forward
        if team.num_ranks == 1 and order.fills and not summing.is_last:
            return np.maximum(found, self._end_of_one(team.ranks[0], passes[team.ranks[0]], num_micro_batch, summing.rate))
        hidden = {rank: own.most.backward * (ends_with_backward and not summing.is_last) for rank, own in passes.items()}
        rate = summing.rate if ends_with_backward or summing.is_last else 0.0
        return np.maximum(found, self._end(team, passes, hidden, num_micro_batch, rate))

    def _passes(self, rank: Group, num_micro_batch: int, rows: tuple[float, ...]) -> Passes:
        """Of a device of a split group, for micro-batches that differ by a row at most."""
        key = rank, num_micro_batch, rows
        if key in self._known:
            return self._known[key]

        def of(sizes: Sequence[float]) -> Pass:
            found = [self.columns.seconds(rank.kind, number) for number in sizes]
            forward, backward = (np.stack(own) / rank.width for own in zip(*((each.forward, each.backward) for each in found), strict=True))
            return Pass(forward, backward, self.columns.counts)

        mean = [number / num_micro_batch for number in rows]
        fewest = [max(1.0, math.floor(number + 1e-9)) for number in mean]
        most = [float(math.ceil(number - 1e-9)) for number in mean]
        equal = of(mean)
        self._known[key] = Passes(equal, equal if fewest == mean else of(fewest), equal if most == mean else of(most))
        return self._known[key]

    def _beside(self, num_stages: int, passes: Mapping[Group, Passes]) -> Floats:
        """Seconds by which a stage waits less for those before it where some of these have only ops that nobody there waits for.

        Such a stage has no more than a run of them, so all together no more than the longest runs.
        """
        runs = np.max([own.mean.both @ self._loose.T for own in passes.values()], axis=0)
        longest: Floats = np.sort(runs, axis=1)[:, ::-1][:, : num_stages - 1].sum(axis=1)
        return longest

    @cached_property
    def _loose(self) -> Floats:
        return loose_runs(self.prices.graph, self.points, self.columns)

    def _end(
        self, team: Team, passes: Mapping[Group, Passes], hidden: Mapping[Group, Floats], num_micro_batch: int, sync_rate: float
    ) -> Floats:
        """The second bound, in the mean whose weights make every rank's share of the ops equally dear."""
        columns, costs = self.columns, self.prices.costs
        per_byte = {rank: (optimizer_seconds(rank.kind, 1.0, 1.0, costs.optimizer_states) + sync_rate) / rank.width for rank in passes}
        priced = {rank: num_micro_batch * own.mean.both - hidden[rank] + per_byte[rank] * columns.trained for rank, own in passes.items()}
        wanted = {rank: 1 / (seconds @ columns.counts) for rank, seconds in priced.items()}
        total = sum(wanted[rank] * number for rank, number in team.numbers.items())
        result: Floats = np.min([(wanted[rank] / total)[:, None] * seconds for rank, seconds in priced.items()], axis=0) @ columns.counts
        return result

    def _end_of_one(self, rank: Group, passes: Passes, num_micro_batch: int, sync_rate: float) -> Floats:
        """The second bound of a rank that has the whole model: of gradients that are whole late in the pass less of the sum can hide."""
        columns = self.columns
        hiding, (num_bytes, left) = passes.most.backward @ columns.counts, columns.last_sums(rank.kind, self.num_rows)
        update = optimizer_seconds(rank.kind, 1.0, 1.0, self.prices.costs.optimizer_states) * num_bytes[-1] / rank.width
        exposed = np.max(sync_rate / rank.width * num_bytes - hiding[:, None] * left, axis=1)
        result: Floats = num_micro_batch * (passes.mean.both @ columns.counts) + exposed + update
        return result

    @cached_property
    def _fastest(self) -> tuple[int, float, float]:
        """Devices of the largest host, and bytes per second of the fastest links inside and between hosts."""
        cluster = self.prices.cluster
        between = (cluster.network, *(link for _, link in cluster.pairs))
        return (
            max(len(host.devices) for host in cluster.hosts),
            max((host.link.bandwidth for host in cluster.hosts if len(host.devices) > 1), default=0.0),
            max((link.bandwidth for link in between if link is not None), default=0.0),
        )

    @cached_property
    def _host_kinds(self) -> Mapping[tuple[tuple[Device, int], ...], int]:
        """What hosts have of each kind, and how many have it."""
        return Counter(tuple(Counter(device.kind for device in host.devices).items()) for host in self.prices.cluster.hosts)

    def _num_hosts(self, teams: Sequence[Team]) -> int:
        """Hosts on which the replicas of these teams are at least, if of each there is a device of one of its kinds on one of them."""
        wanted, found = sum(team.count for team in teams), 0
        rooms = {own: sum(min(team.count, sum(n for kind, n in own if kind in team.taken)) for team in teams) for own in self._host_kinds}
        for own, room in sorted(rooms.items(), key=lambda each: -each[1]):
            if wanted <= 0 or not room:
                break
            number = min(self._host_kinds[own], -(-wanted // room))
            wanted, found = wanted - number * room, found + number
        return found

    def _sync_rate(self, num_owners: int, num_hosts: int) -> float:
        """Seconds per byte of a gradient that so many devices on so many hosts add up at least, in whatever way they do.

        A device of k moves 2 (k - 1) / k of the bytes over its links; a host of H likewise, over those of all its devices.
        """
        if num_owners == 1:
            return 0.0
        largest, inside, outside = self._fastest
        rate = 2 * (num_owners - 1) / num_owners / max(inside, outside)
        rate = max(rate, 2 * (num_hosts - 1) / num_hosts / (largest * outside) if num_hosts > 1 else 0.0)
        return float(f"{0.995 * rate:.2e}")  # rounded down, so that alike arrangements share what is worked out
