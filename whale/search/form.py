"""The closed form of a strategy's step time: stages cut, rows divided, messages and gradient sums over the links.

    lanes   each replica by itself (`whale.search.lane`)
    end     per rank: gradient sums that its last backward pass does not hide, and its optimizer

It ranks strategies; plan and simulation decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np

from whale.config.keys import Recomputation
from whale.errors import WhaleError
from whale.estimate import Line
from whale.estimate.costs.line import Floats
from whale.estimate.prices.budget import Budget
from whale.estimate.step.redundancy import sendable_bytes
from whale.ir.cluster import Device
from whale.planning.cutting.partition import fill
from whale.planning.realizing import Realizer
from whale.planning.replicas.solve import Solver
from whale.planning.shard.stage_price import StagePricing
from whale.planning.strategy import Placed, RankSpec, ReplicaSpec, Strategy
from whale.schedules import BUILDERS
from whale.schedules.idle import RankPasses
from whale.search.freedom import Order
from whale.search.lane import Lane
from whale.search.places import Hops, Numbers, Places

SMALL = 4096
"""Up to this many stages x cut points a pipeline gets the cut of its plan; larger ones a quicker cut. Halved or doubled: none of the 10
searches below differs; 0: two are slower, by 4 and 8 %.
"""

IN_TURN = 1.5
"""Factor of gradient sums where replicas have different split widths: those of the narrower ones sum one after another. Of 10 searches of
examples/benchmarks/constants.py on up to 96 devices, halved or doubled, one, with the effort of one plan, is slower, by 21 and 29 %.
"""


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Seconds of a step; bytes that the fullest device lacks (0 if all seems to fit); bytes that it holds."""

    seconds: float
    lack: float = 0.0
    held: float = 0.0


@dataclass(eq=False)
class ClosedForms:
    """The closed forms of strategies for one graph on one cluster."""

    planner: Realizer
    _totals: dict[tuple[Device, int], tuple[Floats, Floats]] = field(default_factory=dict, init=False)
    _speeds: dict[object, float] = field(default_factory=dict, init=False)
    _known_turns: dict[object, tuple[Floats, Floats]] = field(default_factory=dict, init=False)

    @cached_property
    def places(self) -> Places:
        return Places(self.planner.prices)

    @property
    def num_rows(self) -> int:
        return self.planner.num_rows

    def of(self, strategy: Strategy) -> ClosedForm:
        """The closed form of a strategy with its micro-batches and its order.

        Where memory decides about recomputation, the time lies between none and full recomputation, by the share of bytes
        that must be freed.
        """
        where, own = (self.places.firsts(strategy), self.places.of_first(strategy)), strategy.replicas[0].recompute
        try:
            if own not in (None, "auto"):
                return self._with(strategy, *where, own)[0]
            kept, lanes = self._with(strategy, *where, "none")
            if all(np.all(lane.held <= lane.rooms) for lane in lanes):
                return kept
            recomputed, others = self._with(strategy, *where, "auto")
        except WhaleError:  # it cannot be cut so
            return ClosedForm(math.inf, math.inf, math.inf)
        share = 0.0
        for lane, other in zip(lanes, others, strict=True):
            over, freed = lane.held - lane.rooms, np.maximum(lane.held - other.held, 1.0)
            share = max(share, float(np.max(over / freed)))
        seconds = min(recomputed.seconds, kept.seconds + min(1.0, share) * (recomputed.seconds - kept.seconds))  # another cut may be faster
        return ClosedForm(seconds, min(kept.lack, recomputed.lack), recomputed.held)

    def _with(
        self, strategy: Strategy, firsts: Sequence[Numbers], placed: Sequence[Placed], policy: Recomputation
    ) -> tuple[ClosedForm, list[Lane]]:
        replicas = strategy.replicas
        m, shares = strategy.num_micro_batch, self.shares(replicas)
        pricing = self.planner.pricing_for(replicas, policy)
        lanes = [
            self._lane(replica, own, names, share, policy, pricing)
            for replica, own, names, share in zip(replicas, firsts, placed, shares, strict=True)
        ]
        rows = self._rows(lanes, m)
        sums, alike = self.places.sums(firsts), len({replica.num_ranks for replica in replicas}) == 1
        sums = [[rate * self._in_turn(strategy) for rate in rates] for rates in sums]
        seconds = max(self._with_end(lane, firsts, count, rates, alike=alike) for lane, count, rates in zip(lanes, rows, sums, strict=True))
        lack = max(float(np.max(lane.held - lane.rooms)) for lane in lanes)
        return ClosedForm(seconds + self._copying(replicas, firsts), max(0.0, lack), max(float(lane.held.max()) for lane in lanes)), lanes

    def least(self, strategy: Strategy, num_micro_batch: int) -> tuple[float, float]:
        """Lower bounds, from computing alone: seconds of a step, and bytes on its fullest device."""
        speed = sum(replica.count * self.speed(replica) for replica in strategy.replicas)
        return 1 / speed, self.least_held(strategy, num_micro_batch)

    def spread_seconds(self, strategy: Strategy, num_micro_batch: int) -> float:
        """About the seconds of a step of a split group on any devices, and of single devices beside it, without sums of gradients."""
        group, *others = strategy.replicas
        return 1 / (1 / self._group_seconds(group, num_micro_batch) + sum(map(self.speed, others)))

    def _group_seconds(self, replica: ReplicaSpec, num_micro_batch: int) -> float:
        """Of one split group with all rows.

        Each unit runs whole on the slowest device, or is divided by the devices' speeds; then its exchange goes over the slowest link.
        """
        planner, rows, n = self.planner, self.num_rows / num_micro_batch, replica.num_devices
        links = [planner.cluster.link(*pair) for pair in combinations((replica.names or ())[0], 2)]
        seconds = {kind: np.maximum(self._unit_seconds(kind, rows), 1e-30) for kind in replica.taken}
        shared = 1 / sum(number / seconds[kind] for kind, number in replica.taken.items())
        num_bytes = self._exchanged(rows)
        shared += num_bytes * (n - 1) / n / min(link.bandwidth for link in links)
        shared += (num_bytes > 0) * 2 * max(link.latency for link in links)
        return num_micro_batch * float(np.minimum(np.maximum.reduce(list(seconds.values())), shared).sum())

    def _unit_seconds(self, kind: Device, rows: float) -> Floats:
        """Of a micro-batch, on one device."""
        sums = self.planner.pieces.sums(kind, 1, rows)
        device, host = sums.forward + sums.backward, sums.started_forward + sums.started_backward
        found: Floats = np.maximum(np.diff(device[0] + rows * device[1]), np.diff(host))
        return found

    def _exchanged(self, rows: float) -> Floats:
        """Per unit, about the bytes that a split exchanges for a micro-batch: twice the least of an op's weights, its input, its output."""
        prices, points = self.planner.prices, self.planner.points
        found, by_name = np.zeros(len(points.spine)), prices.graph.by_name
        for index, op in enumerate(map(by_name.__getitem__, points.spine)):
            weights = sum(parameter.spec.num_bytes for parameter in prices.graph.parameters_among(op.inputs))
            if weights:
                read = (name for name in op.inputs if name in by_name and by_name[name].kind == "call")
                found[index] = 2 * min(weights, *(prices.outputs[name].at(rows) for name in (op.name, *read)))
        summed: Floats = np.add.reduceat(found, points.bounds[:-1])
        return summed

    def least_held(self, strategy: Strategy, num_micro_batch: int) -> float:
        """A lower bound of bytes on the fullest device."""
        fewest = min(replica.num_devices // replica.count for replica in strategy.replicas)
        return self._state(fewest, num_micro_batch) / fewest

    def surely_holds(self, strategy: Strategy, num_micro_batch: int) -> bool:
        """Whether each replica of one rank has room for its state, the activations of a micro-batch, and on each device as much again.

        Ops may work on whole tensors there; where that does not fit, they are cut in slower ways.
        """
        points, rows = self.planner.points, self.num_rows / strategy.num_replicas / num_micro_batch
        activations = float(points.held.kept_at(rows)[-1])
        widths = (replica.num_devices // replica.count for replica in strategy.replicas)
        held = (self._state(width, num_micro_batch) + (1 + width) * activations for width in widths)
        return all(own <= self.room(replica) for own, replica in zip(held, strategy.replicas, strict=True))

    def relaxed(self, strategy: Strategy, orders: Sequence[Order], counts: Sequence[int]) -> tuple[Floats, Floats]:
        """A lower bound of seconds (with approximate copies of the state), and about the bytes on the fullest device, for any cuts.

        Returns:
            ``[orders, counts]`` and ``[counts]``, where counts are numbers of micro-batches.
        """
        m = np.array(counts, dtype=np.float64)
        points, training = self.planner.points, self.planner.prices.training
        firsts, replicas = self.places.firsts(strategy), strategy.replicas
        alike = len({replica.num_ranks for replica in replicas}) == 1
        sums = self.places.sums(firsts) if training and strategy.num_replicas > 1 else [None] * len(replicas)
        speeds, end, held = np.zeros((len(orders), len(m))), np.zeros((len(orders), len(m))), np.zeros(len(m))
        for replica, own, rates, share in zip(replicas, firsts, sums, self.shares(replicas), strict=True):
            p, taken = replica.num_ranks, np.maximum(share, m)
            rows = taken / m
            rank = 1 / sum(number / self.totals(each.kind, each.width, rows) for each, number in replica.numbers.items())
            idle, alive = self._turns(tuple(orders), tuple(counts), p)
            idle = idle * max(0.0, self._critical_share * p - 1) / max(1, p - 1)  # branches run beside others
            kept, recomputed = points.held.kept[0, -1] + points.held.kept[1, -1] * rows, np.ones_like(speeds)
            narrowest = min(each.width for each in replica.numbers)
            whole, even = (
                np.array([self._state(number, own) for own in counts]) for number in (replica.num_devices // replica.count, p * narrowest)
            )
            overflows = whole + alive * kept > self.room(replica)
            recomputed[overflows | np.array([[order.recomputes] for order in orders])] += self._shares[0]
            uneven = 1 + p * np.array([[order.num_chunks] for order in orders]) / (2 * points.num_units)
            passes = (m + idle) * rank * recomputed * uneven
            if p > 1:
                hops = self.places.hops(own)
                crossing = (self._least_crossing[0] + self._least_crossing[1] * rows) / 2 / narrowest
                passes = passes + 2 * (float(hops.latency[:-1].sum()) + crossing * float(hops.per_byte[:-1].sum()))
                passes = np.maximum(passes, m * crossing * float(hops.crowded[:-1].max()))
            speeds += replica.count * taken / passes
            held = np.maximum(held, (even + np.minimum(m, p) * kept) / (p * narrowest))
            if training:
                late = np.array([[BUILDERS[order.schedule].delays_weights] for order in orders])
                hidden = (1 - self._shares[0] + late * idle) * rank * alike
                end = np.maximum(end, self._least_end(strategy, replica, hidden, rates))
        return self.num_rows / speeds + end + self._copying(replicas, firsts), held

    def _copying(self, replicas: Sequence[ReplicaSpec], firsts: Sequence[Numbers]) -> float:
        """Approximate seconds per step of sending copies of the state to other hosts, with equal parts on all devices of a replica."""
        if not self._sendable:
            return 0.0
        shares = zip(replicas, self.places.alone(firsts), strict=True)
        most = max(alone * replica.count / replica.num_devices for replica, alone in shares)
        return most * self._sendable / self.places.between(replicas, firsts)

    @cached_property
    def _sendable(self) -> float:
        return sendable_bytes(self.planner.prices)

    def _least_end(self, strategy: Strategy, replica: ReplicaSpec, hidden: Floats, rates: Sequence[Line] | None) -> Floats:
        """What gradient sums and the optimizer add to a step, if ranks hold parts of the model in proportion to their speed.

        Args:
            hidden: seconds of the last backward passes.
            rates: per rank, seconds of a bucket of gradients by bytes; None for a single replica.
        """
        ranks, pieces = replica.ranks or (), self.planner.pieces
        whole = {
            rank: float(pieces.trained(rank.kind, rank.width)[-1]) * self.speed_of(rank) / self.speed(replica) for rank in replica.numbers
        }
        update = min(self.planner.prices.update_seconds(rank.kind, num_bytes) for rank, num_bytes in whole.items())
        if rates is None:
            return np.zeros_like(hidden) + update
        reduced = max(rate.per_row * whole[rank] for rate, rank in zip(rates, ranks, strict=True)) * self._in_turn(strategy)
        return update + np.maximum(reduced - hidden, 0.0)

    def _turns(self, orders: tuple[Order, ...], counts: tuple[int, ...], num_ranks: int) -> tuple[Floats, Floats]:
        """In a pipeline of equal ranks: idle time of one in micro-batches, and micro-batches alive in the mean of the ranks."""
        key = orders, counts, num_ranks
        if key not in self._known_turns:
            m, (forward, weights) = np.array(counts), self._shares
            x = np.array([[num_ranks - 1.0], [1.0]])
            times = x * forward, x * (1 - forward), x * weights
            passes = (RankPasses(*times, m, each.num_chunks, num_ranks=num_ranks) for each in orders)
            idle = [np.zeros(len(m)) + BUILDERS[each.schedule].idle(own)[-1] for each, own in zip(orders, passes, strict=True)]
            alive = [[each.alive(num_ranks, number) for number in counts] for each in orders]
            self._known_turns[key] = np.array(idle), np.array(alive)
        return self._known_turns[key]

    @cached_property
    def _shares(self) -> tuple[float, float]:
        """Approximate shares of the forward pass and of weight gradients in the time of a micro-batch."""
        rows = float(self.num_rows)
        sums = self.planner.pieces.sums(self.planner.cluster.devices[0].kind, 1, rows)
        forward, backward, weights = (float(each[0, -1] + rows * each[1, -1]) for each in (sums.forward, sums.backward, sums.weights))
        return forward / max(1e-30, forward + backward), weights / max(1e-30, forward + backward)

    @cached_property
    def _critical_share(self) -> float:
        """Time of the longest path through the units as a share of all of it; 1 where each reads what the one before it makes."""
        points, device = self.planner.points, self.planner.cluster.devices[0]
        seconds, ends = self._unit_seconds(device.kind, float(self.num_rows)).tolist(), [0.0] * points.num_units
        sources: list[list[int]] = [[] for _ in ends]
        for made, reader in self._payloads(range(points.num_units + 1), range(points.num_units))[2]:
            sources[reader].append(made)
        for unit, own in enumerate(sources):
            ends[unit] = seconds[unit] + max((ends[made] for made in own), default=0.0)
        return float(max(ends) / max(1e-30, sum(seconds)))

    def room(self, replica: ReplicaSpec) -> int:
        """Bytes that the devices of one replica may hold."""
        prices = self.planner.prices
        return sum(prices.room(kind) * number for kind, number in replica.taken.items()) // replica.count

    @cached_property
    def _least_crossing(self) -> tuple[float, float]:
        """Bytes that cross at the cheapest cut, both ways, as a line over rows."""
        points = self.planner.points
        inner = slice(1, -1) if points.num_units > 1 else slice(None)
        return float(points.crossing_fixed[inner].min()), float(points.crossing_per_row[inner].min())

    def shortage(self, replica: ReplicaSpec, num_micro_batch: int) -> int:
        """Bytes by which the parameters alone overflow one replica; 0 where they fit."""
        return max(0, int(self._state(replica.num_devices // replica.count, num_micro_batch)) - self.room(replica))

    def _state(self, num_devices: int, num_micro_batch: int) -> float:
        """Bytes of all parameters with their gradients and optimizer state, on devices that hold equal parts."""
        gradients = float(self.planner.pieces.gradients(self.planner.cluster.devices[0].kind, 1)[-1])
        let_go = self.planner.prices.let_go(gradients / num_devices, Budget(sums_at_once=num_micro_batch == 1))
        return self.planner.points.held.state - num_devices * let_go

    @staticmethod
    def _in_turn(strategy: Strategy) -> float:
        """Factor of the sums' time over that of devices with one sum at a time."""
        return IN_TURN if len({rank.width for replica in strategy.replicas for rank in replica.numbers}) > 1 else 1.0

    def shares(self, replicas: Sequence[ReplicaSpec]) -> list[float]:
        """Rows of each replica in proportion to its speed."""
        speeds = [self.speed(replica) for replica in replicas]
        total = sum(speed * replica.count for speed, replica in zip(speeds, replicas, strict=True))
        return [self.num_rows * speed / total for speed in speeds]

    def speed(self, replica: ReplicaSpec) -> float:
        """1 / seconds in which the devices of one replica process all rows."""
        key = replica.ranks or ()
        if key not in self._speeds:
            self._speeds[key] = sum(number * self.speed_of(rank) for rank, number in replica.numbers.items())
        return self._speeds[key]

    def speed_of(self, rank: RankSpec) -> float:
        """1 / seconds in which the devices of a rank process all rows."""
        if rank not in self._speeds:
            self._speeds[rank] = 1 / float(self.totals(rank.kind, rank.width, np.array([float(self.num_rows)]))[0])
        return self._speeds[rank]

    def totals(self, kind: Device, width: int, rows: Floats) -> Floats:
        """Seconds of the whole model on a device of a split group, by rows of a micro-batch, interpolated."""
        if (kind, width) not in self._totals:
            grid = 2.0 ** (np.arange(2 * self.num_rows.bit_length() + 1) / 2)
            values = [self.planner.pieces.whole_seconds(kind, width, float(own)) for own in grid]
            self._totals[kind, width] = grid, np.array(values)
        return np.interp(rows, *self._totals[kind, width])

    def _lane(
        self, replica: ReplicaSpec, firsts: Numbers, placed: Placed, share: float, policy: Recomputation, pricing: StagePricing
    ) -> Lane:
        m = replica.num_micro_batch or 1
        about = max(1, math.ceil(share / m - 1e-9))
        solver = self.planner.solver(replica, policy, pricing)
        is_small = solver.pipeline.num_stages * self.planner.points.num_units <= SMALL
        units = solver.cut(placed, about).units if is_small else fill(solver.tables, placed, about)
        return self._cut(replica, solver, placed, units, self.places.hops(firsts), self.places.slowest(firsts, replica), about)

    def _cut(
        self,
        replica: ReplicaSpec,
        solver: Solver,
        placed: Placed,
        units: Sequence[int],
        hops: Hops,
        where: Sequence[str | None],
        about: int,
    ) -> Lane:
        """The lane of a replica with given cuts."""
        pipeline, pieces, ranks = solver.pipeline, self.planner.pieces, replica.ranks or ()
        times, hosts, repeated = np.zeros((3, 2, len(ranks))), np.zeros((2, len(ranks))), np.zeros(len(ranks))
        stages = np.zeros((pipeline.num_stages, 2, 2))
        defers = BUILDERS[pipeline.schedule].delays_weights
        for stage, rank in enumerate(pipeline.stage_rank):
            start, stop = units[stage], units[stage + 1]
            sums = pieces.sums(ranks[rank].kind, ranks[rank].width, float(about), where[rank])
            own = np.stack([each[:, stop] - each[:, start] for each in (sums.forward, sums.backward, sums.weights)])
            recomputed = 1.0 if pipeline.recomputed[stage] else solver.policy.share(stage)
            away = sums.away[:, stop] - sums.away[:, start]
            own[:2] -= min(1.0, recomputed) * away  # what is computed again does not go there
            own[1] += recomputed * own[0]
            repeated[rank] = float(pipeline.recomputed[stage] > 0)
            host = np.array([each[stop] - each[start] for each in (sums.started_forward, sums.started_backward)])
            host[1] += recomputed * host[0]
            if defers:
                waiting = self.planner.prices.waiting(self.planner.prices.cluster.by_name[placed[rank][0]], about)
                count = sums.waiting[stop] - sums.waiting[start]
                own[:2, 0] += count * np.array([[1.0], [2.0]])[:, 0] * waiting.device.fixed
                own[:2, 1] += count * np.array([1.0, 2.0]) * waiting.device.per_row
                host += count * np.array([1.0, 2.0]) * waiting.host
            times[:, :, rank] += own
            stages[stage] = own[:2]
            hosts[:, rank] += host
        crossing, read = self._crossing(solver, units, hops)
        is_chain = all((stage, stage + 1) in read for stage in range(pipeline.num_stages - 1))
        held, room = solver.tables.on_ranks(placed, about, units)
        places = tuple((rank, units[stage], units[stage + 1]) for stage, rank in enumerate(pipeline.stage_rank))
        return Lane(replica, pipeline, times, hosts, repeated, crossing, places, held, room, stages, None if is_chain else read)

    def _crossing(self, solver: Solver, units: Sequence[int], hops: Hops) -> tuple[Floats, frozenset[tuple[int, int]]]:
        """`Lane.hops`, `Lane.read`."""
        pipeline = solver.pipeline
        ranks, found = pipeline.stage_rank, np.zeros((2, 2, pipeline.num_ranks))
        share = 0.5 if self.planner.prices.training else 1.0
        passed, sent, read = self._payloads(units, ranks)
        for stage in range(pipeline.num_stages - 1):
            a, b = ranks[stage], ranks[stage + 1]
            rank = min(a, b) - (a == b) if abs(a - b) < 2 else -1  # from the last one to the first
            few, many = sorted((pipeline.width(stage), pipeline.width(stage + 1)))
            copies = (many / few + 1) / 2 / few  # each of few hands it to several, whose gradients one of them sends
            fixed, per_row = share * copies * passed[:2, stage]
            latency = share * passed[2, stage] * hops.latency[rank]
            v = pipeline.num_chunks
            found[0, :, rank] += (latency + fixed * hops.per_byte[rank]) / v, per_row * hops.per_byte[rank] / v
            found[1, :, rank] += share * copies * sent[:2, stage] * hops.crowded[rank]
        return found, read

    def _payloads(self, units: Sequence[int], ranks: Sequence[int]) -> tuple[Floats, Floats, frozenset[tuple[int, int]]]:
        """Per stage but the last: fixed bytes, those per row and messages that the next one waits for; all that the next one is sent.

        What a stage further on reads is sent there at once, or stays on its rank: nobody waits for it on the way. And the pairs of stages
        of which the second reads what the first makes.
        """
        points, inner, read = self.planner.points, list(units[1:-1]), set[tuple[int, int]]()
        passed: Floats = np.stack([points.crossing_fixed[inner], points.crossing_per_row[inner], points.messages[inner]])
        directly = np.zeros_like(passed)
        for far, made, readers in points.skips(units):
            payload = np.array(far.payload)
            passed[:, made : readers[-1]] -= payload[:, None]
            for reader in {*readers} - {made}:
                read.add((made, reader))
                if reader == made + 1:
                    passed[:, made] += payload
                elif ranks[reader] != ranks[made]:
                    directly[:, reader - 1] += payload
        read.update((stage, stage + 1) for stage in np.flatnonzero(passed[2] > 0.5).tolist())
        passed = np.maximum(passed, 0.0) * (np.array(ranks[1:]) != np.array(ranks[:-1]))
        return passed, passed + directly, frozenset(read)

    def _rows(self, lanes: Sequence[Lane], m: int) -> list[int]:
        """Rows of each replica that minimise the slowest."""
        if len(lanes) == 1:
            return [max(m, -(-self.num_rows // lanes[0].replica.count))]
        every = np.arange(m, max(m, self.num_rows) + 1, dtype=np.float64)
        curves = [np.maximum.accumulate(lane.seconds(every)) for lane in lanes]
        counts = [lane.replica.count for lane in lanes]
        left = self.num_rows - m * sum(counts)
        if left <= 0:
            return [m] * len(lanes)
        values = np.concatenate([curve[1:] for curve in curves])
        weights = np.repeat(counts, [len(curve) - 1 for curve in curves])
        order = np.argsort(values, kind="stable")
        level = values[order][min(int(np.searchsorted(np.cumsum(weights[order]), left)), len(order) - 1)]
        return [m + max(0, int(np.searchsorted(curve[1:], level, side="right"))) for curve in curves]

    def _with_end(self, lane: Lane, firsts: Sequence[Numbers], rows: int, rates: Sequence[Line], *, alike: bool) -> float:
        """Seconds of a step of a replica with so many rows.

        Args:
            rates: per rank, seconds of a bucket of gradients by bytes.
            alike: whether all replicas have equally many ranks, so that sums hide behind backward passes.
        """
        pipeline, prices = lane.pipeline, self.planner.prices
        passes, ends = lane.ends(float(rows))
        if not prices.training:
            return passes
        last, total = 0.0, 0.0
        late = BUILDERS[pipeline.schedule].delays_weights and pipeline.num_ranks > 1
        for rank, spec in enumerate(lane.replica.ranks or ()):
            stages = [(start, stop) for own, start, stop in lane.places if own == rank]
            exposed = self._exposed(spec, stages, rows / pipeline.num_micro_batch, rates[rank], late=late, hides=alike)
            trained = self.planner.pieces.trained(spec.kind, spec.width)
            num_bytes = sum(float(trained[stop] - trained[start]) for start, stop in stages)
            update = prices.update_seconds(spec.kind, num_bytes)
            last, total = max(last, float(ends[rank]) + exposed + update), max(total, exposed + update)
        tied = self._tied(lane)
        if tied:
            rate = self.places.ends(firsts)
            last += rate.fixed + rate.per_row * tied
        return max(last, passes) if alike else passes + total

    def _exposed(self, spec: RankSpec, stages: Sequence[tuple[int, int]], rows: float, rate: Line, *, late: bool, hides: bool) -> float:
        """Seconds of a rank's gradient sums after its last backward pass, or after its last weight gradients."""
        if rate == Line():
            return 0.0
        pieces = self.planner.pieces
        trained, sums = pieces.trained(spec.kind, spec.width), pieces.sums(spec.kind, spec.width, float(max(1.0, rows)))
        bucket = float(self.planner.prices.costs.bucket_bytes)
        passing = sums.weights if late else sums.backward
        left, seconds = 0.0, 0.0
        for start, stop in reversed(stages):  # of several chunks the first ends last
            num_bytes = trained[start + 1 : stop + 1] - trained[start]
            reduced = num_bytes * rate.per_row + np.ceil(num_bytes / bucket) * rate.fixed
            done = passing[0, start:stop] - passing[0, start] + (passing[1, start:stop] - passing[1, start]) * rows
            seconds = float(np.max(np.maximum(reduced + left - done * hides, 0.0), initial=0.0))
            left = seconds
        return seconds

    def _tied(self, lane: Lane) -> float:
        """Gradient bytes of parameters that several ranks of a replica read (tied weights)."""
        points = self.planner.points
        if not points.read_again:
            return 0.0
        ranks, starts, stops = zip(*lane.places, strict=True)
        trained = float(self.planner.pieces.trained(self.planner.cluster.devices[0].kind, 1)[-1])
        return points.read_apart((*starts, stops[-1]), ranks) / max(1.0, points.held.state) * trained
