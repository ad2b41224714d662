"""What an arrangement probably takes: its bound, and what a bound leaves out, roughly. It says which are planned first, and no more."""

from __future__ import annotations

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
        links = [self._between(a, b, team.width) for a, b in pairwise(team.kinds)]
        num_bytes = self._crossing.at(rows) / team.width
        waits = [2 * link.latency + num_bytes / link.bandwidth for link in links]
        ahead = min(m, p if v == 1 else 2 * p)
        return max(
            bound + sum(waits), m * (p * own + v * sum(waits)) / ahead, m * v * max(num_bytes / 2 / link.bandwidth for link in links)
        )

    def _inside(self, team: Team, rows: float) -> float:
        """What split groups exchange for one micro-batch: about one sum, both ways, for every two products with parameters."""
        if team.width == 1:
            return 0.0
        link = next(host.link for host in self.prices.cluster.hosts if any(device.kind == team.kinds[0] for device in host.devices))
        moved, count = self._products
        steps = 2 * (team.width - 1)
        return (steps * count * link.latency + steps / team.width * moved.at(rows) / link.bandwidth) / team.num_ranks

    def _sums(self, arrangement: Arrangement, bound: float) -> float:
        """What the last backward pass cannot hide of the sums of gradients, if all that hold a parameter are neighbours."""
        if arrangement.num_replicas == 1 or not self.prices.training:
            return 0.0
        owners = tuple((team.kinds[0], team.count) for team in arrangement.teams)
        held = self._trained / min(team.num_ranks * team.width for team in arrangement.teams)
        key = owners, held
        if key not in self._known:
            devices = self.prices.cluster.devices
            names = [name for kind, count in owners for name in islice((each.name for each in devices if each.kind == kind), count)]
            self._known[key] = all_reduce_seconds(self.prices.cluster, names, held)
        return max(0.0, self._known[key] - BACKWARD * bound / arrangement.num_micro_batch)

    @cached_property
    def _known(self) -> dict[tuple[tuple[tuple[Device, int], ...], float], float]:
        return {}

    def _between(self, one: Device, other: Device, width: int) -> Link:
        """The link between neighbours of two kinds: inside a host, if one has both."""
        need = {one: width, other: width} if one != other else {one: 2 * width}
        for host in self.prices.cluster.hosts:
            if all(sum(device.kind == kind for device in host.devices) >= number for kind, number in need.items()):
                return host.link
        network = self.prices.cluster.network
        return network if network is not None else self.prices.cluster.hosts[0].link

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
