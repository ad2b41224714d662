"""What a step of an arrangement roughly takes, without a plan: its stages cut, its messages and sums over links that it would have.

It says which arrangements are planned first, and which seem not to fit; a plan and its simulation have the last word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from whale.estimate import Line, optimizer_seconds, pipeline_seconds
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.schedules import BUILDERS, most_waiting, peak_in_flight, placement
from whale.search.arrangement import Arrangement, Group, Order, Team, sums_in_backward
from whale.search.sketch.cutting import Cut, Stage, cut
from whale.search.sketch.links import Ties
from whale.search.sketch.pieces import Pieces

BACKWARD = 2 / 3
"""About this share of the time for a micro-batch is its backward pass."""

PLAIN = Order("1f1b")

ROUNDS = 2
"""How often rows are given out among unlike replicas: by the speed of their devices first, then by what they took."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A replica of a team, cut.

    Attributes:
        seconds: per rank, of one micro-batch, with what its split groups exchange.
        trained: per rank, bytes of the gradients that a device has.
        pipeline: of all micro-batches, with messages.
    """

    seconds: tuple[float, ...]
    trained: tuple[float, ...]
    pipeline: float


@dataclass(eq=False)
class Sketches:
    """Rough times of arrangements of one graph on one cluster.

    Attributes:
        prices: of the graph on the cluster.
        pieces: of the model.
        ties: between the devices of arrangements.
        num_rows: of the global batch.
        again: whether all is computed again in the backward pass: what is tried, in this order, until it fits.
    """

    prices: Prices
    pieces: Pieces
    ties: Ties
    num_rows: int
    again: tuple[bool, ...]
    _lanes: dict[tuple[Team, Order, int, float], Lane | None] = field(default_factory=dict, init=False)
    _speeds: dict[Team, float] = field(default_factory=dict, init=False)
    _unfilled: dict[Device, float] = field(default_factory=dict, init=False)
    _peaks: dict[tuple[Order, int, int], tuple[int, ...]] = field(default_factory=dict, init=False)
    _cuts: dict[tuple[Team, Order, int, float, float, bool], Cut | None] = field(default_factory=dict, init=False)

    def seconds(self, arrangement: Arrangement, *, near: bool) -> float:
        """Seconds of a step; infinite where it seems not to fit.

        Args:
            near: whether replicas fill hosts; else those who hold the same stage are neighbours.
        """
        teams, m = arrangement.teams, arrangement.num_micro_batch
        rows = [max(float(m), own) for own in self.shares(teams)]
        for _ in range(ROUNDS if len(teams) > 1 else 1):
            lanes = [self._lane(team, arrangement.order, m, own, near=near) for team, own in zip(teams, rows, strict=True)]
            found = [lane for lane in lanes if lane is not None]
            if len(found) < len(lanes):
                return math.inf
            speeds = [own / lane.pipeline for own, lane in zip(rows, found, strict=True)]
            total = sum(speed * team.count for speed, team in zip(speeds, teams, strict=True))
            rows = [max(self.num_rows * speed / total, float(m)) for speed in speeds]
        return max(self._with_end(lane, team, arrangement, near=near) for lane, team in zip(found, teams, strict=True))

    def shares(self, teams: Sequence[Team]) -> list[float]:
        """Rows of a replica of each team, if its devices took as many as they are fast."""
        speeds = [self.speed(team.one) for team in teams]
        total = sum(speed * team.count for speed, team in zip(speeds, teams, strict=True))
        return [self.num_rows * speed / total for speed in speeds]

    def speed(self, one: Team) -> float:
        """Of a replica: how often its devices would do the work on all rows in a second."""
        if one not in self._speeds:
            self._speeds[one] = sum(number / self._work(kind) for kind, number in one.taken.items())
        return self._speeds[one]

    def _work(self, kind: Device) -> float:
        """Seconds of a device for all rows."""
        return self.pieces.seconds(Group(kind), float(self.num_rows), again=False)[0][-1]

    def share_of(self, team: Team) -> float:
        """Rows of a replica of a team, if all devices of the cluster took as many as they are fast."""
        return self.num_rows * self.speed(team.one) / self._all_speeds

    @cached_property
    def _all_speeds(self) -> float:
        return sum(1 / self._work(device.kind) for device in self.prices.cluster.devices)

    def about(self, team: Team, order: Order, num_micro_batch: int) -> float:
        """Seconds in which a replica of one kind computes its `share_of` the rows, if its ranks had equal parts of the work."""
        rows = max(self.share_of(team), num_micro_batch) / num_micro_batch
        whole = self.pieces.total(team.ranks[0], rows)[0]
        if team.num_ranks == 1 or not order.fills:
            return num_micro_batch * whole / team.num_ranks
        return (num_micro_batch + team.num_ranks - 1) * whole / team.num_ranks

    @cached_property
    def parameter_bytes(self) -> int:
        """Of all parameters, with what training keeps beside them."""
        return sum(self.prices.parameter_bytes(parameter.name) for parameter in self.prices.graph.parameters)

    def shortage(self, team: Team) -> int:
        """Bytes by which the parameters alone overflow a replica of this team; 0 where they fit."""
        room = sum(self.prices.costs.capacity(kind) * number for kind, number in team.one.taken.items())
        return max(0, self.parameter_bytes - room)

    def fits(self, team: Team, rows: float, scale: float, micro_batches: int | None, order: Order = PLAIN) -> bool:
        """Whether a replica of a team with so many rows would fit in memories that are so much larger.

        Args:
            micro_batches: their number; None for one a row.
        """
        m = max(1, int(rows)) if micro_batches is None else micro_batches
        return any(self._cut(team, order, m, rows, scale, again=again) is not None for again in self.again)

    def _lane(self, team: Team, order: Order, m: int, rows: float, *, near: bool) -> Lane | None:
        key = team.one, order, m, rows
        if key not in self._lanes:
            self._lanes[key] = self._alone(team, order, m, rows)
        lane = self._lanes[key]
        if lane is None or team.num_ranks == 1:
            return lane
        num_bytes = self.pieces.crossing.at(rows / m) / team.narrowest
        return replace(lane, pipeline=self._with_messages(team, order, m, lane, num_bytes, near=near))

    def _alone(self, team: Team, order: Order, m: int, rows: float) -> Lane | None:
        """A replica without messages."""
        cuts = (self._cut(team, order, m, rows, 1.0, again=again) for again in self.again)
        found = next((each for each in cuts if each is not None), None)
        if found is None:
            return None
        pieces = self._pieces_for(len(found.seconds))
        exchanged = {group: self.inside(group, rows / m) / team.num_ranks for group in team.numbers}
        seconds, trained = [exchanged[group] for group in team.ranks], [0.0] * team.num_ranks
        for own, rank, (start, stop) in zip(found.seconds, _stage_ranks(team, order), pairwise(found.bounds), strict=True):
            seconds[rank] += own
            trained[rank] += (pieces.trained[stop] - pieces.trained[start]) / team.ranks[rank].width
        drain = self.unfilled(order, team.ranks[0].kind) * sum(seconds[:-1])
        return Lane(tuple(seconds), tuple(trained), float(pipeline_seconds(order.schedule, seconds, m, order.num_chunks)) + drain)

    def unfilled(self, order: Order, kind: Device) -> float:
        """The share of the passes of the ranks before it that a rank stands idle beside what its fill takes.

        Under ``zb_h1`` each micro-batch that drains leaves a weight gradient to fill with, which takes less than the gradient of its input.
        """
        if order.schedule != "zb_h1":
            return 0.0
        if kind not in self._unfilled:
            columns = self.pieces.columns
            times = columns.seconds(kind, float(self.num_rows))
            idle = float((times.backward * (1 - 2 * self.prices.weight_shares[columns.firsts])) @ columns.counts)
            self._unfilled[kind] = max(0.0, idle) / float((times.forward + times.backward) @ columns.counts)
        return self._unfilled[kind]

    def _with_messages(self, team: Team, order: Order, m: int, lane: Lane, num_bytes: float, *, near: bool) -> float:
        """The first and last pass wait for all messages, the others where a link, or what may be in flight, is too little."""
        v, borders = order.num_chunks, self.ties.borders(team, near=near)
        waiting = 2 * borders.latency + num_bytes * borders.per_byte
        ahead = max(1.0, self.in_flight(order, team.num_ranks, m)[0] / v)
        return max(lane.pipeline + waiting, m * (sum(lane.seconds) + v * waiting) / ahead, m * v * num_bytes / 2 * borders.narrowest)

    def _with_end(self, lane: Lane, team: Team, arrangement: Arrangement, *, near: bool) -> float:
        """With what the last backward passes cannot hide of the sums of gradients, and the optimizer."""
        if not self.prices.training:
            return lane.pipeline
        m, teams = arrangement.num_micro_batch, arrangement.teams
        hides = BACKWARD if sums_in_backward(teams) else 0.0
        rates = self.ties.sum_rates(teams, team, near=near)
        if team.num_ranks == 1:
            return lane.pipeline + self._end_of_one(team.ranks[0], hides * lane.seconds[0], rates[0])
        slowest, before, order, whole = lane.pipeline, 0.0, arrangement.order, sum(lane.seconds)
        updates = {kind: optimizer_seconds(kind, 1.0, 1.0, self.prices.costs.optimizer_states) for kind in team.taken}
        for group, own, trained, rate in zip(team.ranks, lane.seconds, lane.trained, rates, strict=True):
            after = whole - before - own
            sooner = (1 - BACKWARD) * after if order.fills_forward else BACKWARD * before / order.num_chunks
            exposed = max(0.0, trained * rate - hides * own)
            slowest = max(slowest, max(lane.pipeline - sooner, m * own) + exposed + trained * updates[group.kind])
            before += own
        return slowest + self.pieces.tied * self.ties.ends_rate(team, near=near)

    def _end_of_one(self, group: Group, hiding: float, rate: float) -> float:
        """What one rank that has the whole model adds to its passes, if sums may hide behind so much of them."""
        num_bytes, left = self.pieces.columns.last_sums(group.kind, self.num_rows)
        update = optimizer_seconds(group.kind, 1.0, 1.0, self.prices.costs.optimizer_states) * num_bytes[-1]
        return float(np.max(rate * num_bytes / group.width - hiding * left)) + float(update) / group.width

    def _cut(self, team: Team, order: Order, m: int, rows: float, scale: float, *, again: bool) -> Cut | None:
        """The cut of a replica whose devices have so many times the memory that they have."""
        key = team.one, order, m, rows, scale, again
        if key not in self._cuts:
            self._cuts[key] = self._found(team, order, m, rows, scale, again=again)
        return self._cuts[key]

    def _found(self, team: Team, order: Order, m: int, rows: float, scale: float, *, again: bool) -> Cut | None:
        own, ranks, stages = rows / m, _stage_ranks(team, order), list[Stage]()
        pieces = self._pieces_for(len(ranks))
        largest = math.ceil(own - 1e-9)  # micro-batches differ by a row
        kept, received = pieces.kept(largest), self.pieces.crossing.at(largest) / 2
        peaks = self.in_flight(order, team.num_ranks, m)
        waiting = most_waiting(order.schedule, num_ranks=team.num_ranks, num_micro_batch=m, num_chunks=order.num_chunks) if again else peaks
        seconds = {group: pieces.seconds(group, own, again=again) for group in team.numbers}
        rooms = {group: scale * self.prices.costs.capacity(group.kind) * group.width / order.num_chunks for group in team.numbers}
        for stage, rank in enumerate(ranks):
            group, alive = team.ranks[rank], -(-peaks[rank] // order.num_chunks)
            room = rooms[group] - alive * received * (stage > 0) + pieces.twice * (len(ranks) == 1)
            if again:
                room -= 2 * math.sqrt(alive * received * kept[-1] / len(ranks))
            stages.append(Stage(*seconds[group], pieces.parameters, kept, waiting[rank] if again else alive, room))
        return cut(stages, pieces.num_units)

    def _pieces_for(self, num_stages: int) -> Pieces:
        """Those that stages are made of: between light places, where there are enough."""
        return self.pieces.light if self.pieces.light.num_units >= num_stages else self.pieces

    def in_flight(self, order: Order, num_ranks: int, num_micro_batch: int) -> tuple[int, ...]:
        """Per rank, pieces of micro-batches that are alive at once."""
        key = order, num_ranks, num_micro_batch
        if num_ranks == 1:
            return (order.num_chunks,)
        if key not in self._peaks:
            group = min(num_ranks, num_micro_batch) if BUILDERS[order.schedule].takes_group else None
            self._peaks[key] = peak_in_flight(
                order.schedule, num_ranks=num_ranks, num_micro_batch=num_micro_batch, num_chunks=order.num_chunks, group_size=group
            )
        return self._peaks[key]

    def inside(self, group: Group, rows: float) -> float:
        """What a split group exchanges for a micro-batch and all ops: about a sum, both ways, for every two products with parameters."""
        if group.width == 1:
            return 0.0
        moved, count = self._products
        link, steps = self.ties.inside(group), 2 * (group.width - 1)
        return steps * count * link.latency + steps / group.width * moved.at(rows) * link.per_byte

    @cached_property
    def _products(self) -> tuple[Line, int]:
        """Bytes that products with parameters make, by rows, and how many there are."""
        graph, outputs = self.prices.graph, self.prices.outputs
        found = [
            outputs[op.name]
            for op in graph.ops
            if op.kind == "call" and op.forward_flops and any(graph.by_name[name].kind == "parameter" for name in op.inputs)
        ]
        return Line.sum(found), len(found)


def _stage_ranks(team: Team, order: Order) -> tuple[int, ...]:
    return placement(order.schedule, num_ranks=team.num_ranks, num_chunks=order.num_chunks) if team.num_ranks > 1 else (0,)
