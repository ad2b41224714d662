"""What an arrangement probably takes: its bound, and what a bound leaves out, roughly. It says which are planned first, and no more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

import numpy as np

from whale.estimate import Line, all_reduce_seconds
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device, Link
from whale.planning.pipeline.cut_points import CutPoints
from whale.search.arrangement import Arrangement, Team

QUANTILE = 0.25
"""At the lightest so large a share of the places to cut there are enough for the stages."""

SAMPLE = 64
"""Sums over more devices of a team cost about as much per byte as over so many."""

BACKWARD = 2 / 3
"""About this share of the time for a micro-batch is its backward pass."""


@dataclass(frozen=True)
class Promise:
    """Rough times of arrangements of one graph on one cluster.

    Attributes:
        prices: of the graph on the cluster.
        points: where the model can be cut.
        num_rows: of the global batch.
    """

    prices: Prices
    points: CutPoints
    num_rows: int

    def of(self, arrangement: Arrangement, bound: float) -> float:
        """Seconds of a step, roughly."""
        m = arrangement.num_micro_batch
        rows = self.num_rows / arrangement.num_replicas / m
        slowest = max(self._pipeline(team, arrangement, bound, rows) for team in arrangement.teams)
        return slowest + m * max(self._inside(team, rows) for team in arrangement.teams) + self._sums(arrangement, bound)

    def _pipeline(self, team: Team, arrangement: Arrangement, bound: float, rows: float) -> float:
        """With messages: the first and last pass wait for all of them, the others where a link, or what may be in flight, is too little."""
        m, p, v = arrangement.num_micro_batch, team.num_ranks, arrangement.order.num_chunks
        if p == 1:
            return bound
        own = bound / (m + (p - 1) / v)
        bound = max(bound, own * (m + (p - 1) / v))
        num_bytes = self._crossing.at(rows) / team.width
        waiting, slowest = 0.0, math.inf
        for (one, other), number in _borders(team):
            link = self._between(one, other, team.width)
            waiting += number * (2 * link.latency + num_bytes / link.bandwidth)
            slowest = min(slowest, link.bandwidth)
        ahead = min(m, p if v == 1 else 2 * p)
        return max(bound + waiting, m * (p * own + v * waiting) / ahead, m * v * num_bytes / 2 / slowest)

    def _inside(self, team: Team, rows: float) -> float:
        """What split groups exchange for one micro-batch: about one sum, both ways, for every two products with parameters."""
        if team.width == 1:
            return 0.0
        link = self._between(team.kinds[0], team.kinds[0], team.width)
        moved, count = self._products
        steps = 2 * (team.width - 1)
        return (steps * count * link.latency + steps / team.width * moved.at(rows) / link.bandwidth) / team.num_ranks

    def _sums(self, arrangement: Arrangement, bound: float) -> float:
        """What the last backward pass cannot hide of the sums of gradients, if all that hold a parameter are neighbours."""
        if arrangement.num_replicas == 1 or not self.prices.training:
            return 0.0
        owners = tuple((team.kinds[0], min(team.count, SAMPLE)) for team in arrangement.teams)
        if owners not in self._rates:
            devices = self.prices.cluster.devices
            names = [name for kind, count in owners for name in islice((each.name for each in devices if each.kind == kind), count)]
            self._rates[owners] = all_reduce_seconds(self.prices.cluster, names, self._trained) / max(1, self._trained)
        held = self._trained / min(team.num_ranks * team.width for team in arrangement.teams)
        return max(0.0, held * self._rates[owners] - BACKWARD * bound / arrangement.num_micro_batch)

    @cached_property
    def _rates(self) -> dict[tuple[tuple[Device, int], ...], float]:
        return {}

    @cached_property
    def _links(self) -> dict[tuple[Device, Device, int], Link]:
        return {}

    def _between(self, one: Device, other: Device, width: int) -> Link:
        """The link between neighbours of two kinds: inside a host, if one has both."""
        key = one, other, width
        if key not in self._links:
            need = {one: width, other: width} if one != other else {one: 2 * width}
            cluster = self.prices.cluster
            inside = (
                host.link
                for host in cluster.hosts
                if all(sum(device.kind == kind for device in host.devices) >= number for kind, number in need.items())
            )
            self._links[key] = next(inside, None) or cluster.network or cluster.hosts[0].link
        return self._links[key]

    @cached_property
    def _crossing(self) -> Line:
        """Bytes that cross a cut, both ways, by rows."""
        inner = slice(1, -1) if self.points.num_units > 1 else slice(None)
        fixed, per_row = self.points.crossing_fixed[inner], self.points.crossing_per_row[inner]
        return Line(float(np.quantile(fixed, QUANTILE)), float(np.quantile(per_row, QUANTILE)))

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

    @cached_property
    def _trained(self) -> int:
        return sum(each.spec.num_bytes for each in self.prices.graph.parameters if each.trainable)


def _borders(team: Team) -> Iterator[tuple[tuple[Device, Device], int]]:
    """The kinds on both sides of the borders between ranks, and how many borders are like it."""
    for kind, number in team.runs:
        if number > 1:
            yield (kind, kind), number - 1
    for (one, _), (other, _) in pairwise(team.runs):
        yield (one, other), 1
