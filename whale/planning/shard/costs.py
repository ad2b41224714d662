"""Costs of every label of every class of ops on the devices of a split group, and of every bridge between them.

For n units of an axis on a device, of a micro-batch:

    op, whole          all of its time, on every device
    op along an axis   arithmetic by n / size, traffic by what has the axis; contracted axes are summed, at once or
                       (scattered) half forward and half backward
    tensor             each form in which it is used and does not lie is one bridge, shared by the users of that form
    parameter          where only work on parts uses a whole one, its gradient is summed once per step; the optimizer steps
                       what a device holds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from whale.estimate import Line, optimizer_seconds
from whale.estimate.costs.line import Floats
from whale.estimate.costs.op_table import is_free
from whale.estimate.prices.collective_costs import CollectiveCosts, StagePlace
from whale.estimate.prices.prices import Prices
from whale.estimate.prices.traffic import CutTraffic, cut_traffic
from whale.ir.cluster import Device
from whale.ir.graph import Op
from whale.ir.plan import BATCH, Shard
from whale.planning.shard.classes import WHOLE, Classes, Label, Tensors, Use
from whale.planning.shard.memory import HeldBytes, MemoryBudget
from whale.planning.shard.problem import BridgeCost, ChosenLabels, LabelCost, LabelMemory, LabelProblem, TensorCost
from whale.planning.shard.solver import solve_labels
from whale.sharding.bridges import Bridge

GRID = 33  # points at which times are computed; linear in between; halved or doubled: none of 8 plans differs

Sizes = tuple[tuple[int, ...], ...]
"""Per kind, the units of each position."""


@dataclass(frozen=True)
class PlacedDevice:
    """A device type at one position of the groups."""

    position: int
    device: Device


class SplitCosts:
    """Costs of one stage at one place; of memory only what it holds, not what the devices have."""

    def __init__(self, classes: Classes, prices: Prices, site: StagePlace) -> None:
        self.classes, self.prices, self.site = classes, prices, site
        self._collective_costs = CollectiveCosts(prices, site)
        self._workers = tuple(_workers(prices, site))
        self._held: dict[MemoryBudget, HeldBytes] = {}
        self._problems: dict[tuple[Sizes, tuple[int, ...]], LabelProblem] = {}
        self._fitting: dict[tuple[Sizes, tuple[int, ...]], list[tuple[LabelProblem, ChosenLabels | None]]] = {}
        self._by_share: dict[tuple[int, Device], Floats] = {}
        self._curves: dict[tuple[int, frozenset[int] | None], tuple[Floats, ...]] = {}

    @property
    def kinds(self) -> range:
        """The kinds of axes that may be cut."""
        return range(len(self.classes.space.kinds))

    def size(self, kind: int) -> int:
        """Units of the axes of a kind; of the batch, the rows that a group takes."""
        axis = self.classes.space.kinds[kind][0]
        return int(self.site.num_rows) if axis == BATCH else self.prices.axes.by_name[axis].size

    @cached_property
    def whole(self) -> float:
        """Seconds of the stage if nothing is cut, on the slowest device."""
        stepping = sum(self._optimizer_seconds(number, Label(), None) for number in range(len(self.classes.nodes)))
        return float(np.max(np.sum(self._whole_seconds, axis=0))) + stepping

    def best(self, sizes: Sizes, insisted: tuple[int, ...], budget: MemoryBudget | None = None) -> ChosenLabels | None:
        """The fastest labels that fit, at some sizes.

        Args:
            insisted: kinds along which every op works that can.
            budget: what the devices hold; None ignores memory.
        """
        key, problem = (sizes, insisted), self.problem(sizes, insisted, budget)
        for roomier, best in self._fitting.setdefault(key, []):  # what is best of more is best of fewer, if it is among them
            if best is None:
                return None
            if roomier.memory is None or (problem.memory and roomier.memory.fits_where(problem.memory)):
                placed = problem.evaluate(best.labels)
                if placed is not None and placed.excess <= 0:
                    return replace(placed, gap=best.gap)
        found = solve_labels(problem)
        if budget is None or (found is not None and found.excess <= 0):
            self._fitting[key].append((problem, found))
        return found

    def problem(self, sizes: Sizes, insisted: tuple[int, ...], budget: MemoryBudget | None = None) -> LabelProblem:
        """The problem with fixed sizes of every kind; arguments as of `best`."""
        shares, key = self._shares(sizes), (sizes, insisted)
        if key not in self._problems:
            nodes = tuple(tuple(self._label_costs(number, along, shares)) for number, along in enumerate(self._times(shares)))
            tensors = tuple(cost for _, cost in self._crossed)
            self._problems[key] = LabelProblem(nodes, tensors, len(self.kinds), tuple(self._insisted(insisted)))
        return self._problems[key] if budget is None else replace(self._problems[key], memory=self._memory(shares, budget))

    def _memory(self, shares: Floats, budget: MemoryBudget) -> LabelMemory:
        if budget not in self._held:
            self._held[budget] = HeldBytes(self.classes, self.prices, self.site.num_rows, budget, self._crossed)
        return self._held[budget].memory(shares)

    def lacking_by_units(self, labels: Sequence[int], budget: MemoryBudget) -> tuple[Floats, Floats]:
        """Per position, bytes that a device lacks under some labels, with no unit of any axis, and with all; negative: free."""
        shape = len(self.kinds), self.site.width
        none, every = (self._memory(shares, budget).lacking(labels) for shares in (np.zeros(shape), np.ones(shape)))
        return none, every

    def handled(self, shards: tuple[Shard, ...]) -> Floats:
        """Seconds of handling per position and micro-batch; sizes of the cuts do not matter."""
        scene, found = self.classes.scene, np.zeros(self.site.width)
        for worker in self._workers:
            if worker.device.handling:
                bridges = self.prices.bridges(scene.ops, shards, scene.returned)
                seconds = Line.sum(self._collective_costs.handled(bridges, worker.device)).at(self.site.num_rows)
                found[worker.position] = max(found[worker.position], seconds)
        return found

    def curves(self, kind: int, nodes: frozenset[int] | None = None) -> tuple[Floats, ...]:
        """Per position, seconds of the ops along a kind by units held; `nodes`: those that work along it, None for all that can."""
        if (kind, nodes) not in self._curves:
            self._curves[kind, nodes] = self._curves_of(kind, nodes)
        return self._curves[kind, nodes]

    def _curves_of(self, kind: int, nodes: frozenset[int] | None) -> tuple[Floats, ...]:
        size = self.size(kind)
        shares = np.linspace(0.0, 1.0, min(GRID, size + 1))
        found: list[Floats] = [np.zeros(size + 1)] * self.site.width
        for worker in self._workers:
            if kind not in self._traffic:
                return tuple(np.linspace(0.0, 1.0, size + 1) for _ in found)
            members, _ = self._traffic[kind]
            counts = [len(self.classes.nodes[node].ops) if nodes is None or node in nodes else 0 for node in members]
            times = self._seconds_by_share(kind, worker.device, shares) @ np.array(counts, dtype=np.float64)
            curve = np.maximum.accumulate(np.interp(np.arange(size + 1) / size, shares, times))
            found[worker.position] = np.maximum(found[worker.position], curve)
        return tuple(found)

    def _seconds_by_share(self, kind: int, device: Device, shares: Floats) -> Floats:
        """Per share of the axes, seconds of each op along a kind."""
        key = kind, device.kind
        if key not in self._by_share:
            members, traffic = self._traffic[kind]
            tiled = np.tile(shares[:, None], len(members))
            self._by_share[key] = traffic.seconds(device, self.site.num_rows, tiled, self.prices.costs, training=self.prices.training)
        return self._by_share[key]

    def _shares(self, sizes: Sizes) -> Floats:
        """Per kind and position, the shares of the axes."""
        return np.array([np.array(own) / self.size(kind) for kind, own in enumerate(sizes)]).reshape(len(sizes), self.site.width)

    def _insisted(self, kinds: Sequence[int]) -> Iterator[tuple[int, int]]:
        for number, node in enumerate(self.classes.nodes):
            for kind in kinds:
                if node.first.kind == "call" and any(label.work == kind for label in node.labels):
                    yield number, kind

    @cached_property
    def _whole_seconds(self) -> Floats:
        """Per node and worker, seconds of its members run whole."""
        members, position = self.classes.members, self.prices.table.position
        index = [[position[name] for op in node.ops for name in members[op.name]] for node in self.classes.nodes]
        found = np.zeros((len(index), len(self._workers)))
        for number, worker in enumerate(self._workers):
            seconds = self.prices.seconds(worker.device, self.site.num_rows)
            forward = seconds.forward_fixed + self.site.num_rows * seconds.forward_per_row
            both = forward + seconds.backward_fixed + self.site.num_rows * seconds.backward_per_row
            found[:, number] = [both[own].sum() for own in index]
        return found

    @cached_property
    def _traffic(self) -> dict[int, tuple[tuple[int, ...], CutTraffic]]:
        """Per kind, the nodes that can work along it, and their first ops as a table."""
        found: dict[int, list[int]] = {}
        for number, node in enumerate(self.classes.nodes):
            if not is_free(node.first):
                for kind in dict.fromkeys(label.work for label in node.labels if label.work != WHOLE):
                    found.setdefault(kind, []).append(number)
        return {kind: (tuple(nodes), self._traffic_of(kind, nodes)) for kind, nodes in found.items()}

    def _traffic_of(self, kind: int, nodes: Sequence[int]) -> CutTraffic:
        ops = [self.classes.nodes[number].first for number in nodes]
        work = [(op, self.classes.work(op.name, Label(kind))) for op in ops]
        return cut_traffic(self.prices.graph, self.prices.axes, self.prices.table, work)

    def _times(self, shares: Floats) -> list[dict[int, Floats]]:
        """Per node, by the kind along which its members work, their seconds per worker."""
        found: list[dict[int, Floats]] = [{WHOLE: own} for own in self._whole_seconds]
        costs = self.prices.costs
        for kind, (members, traffic) in self._traffic.items():
            counts = np.array([len(self.classes.nodes[node].ops) for node in members], dtype=np.float64)
            rows = np.array(
                [
                    traffic.seconds(
                        worker.device,
                        self.site.num_rows,
                        np.full(len(members), shares[kind, worker.position]),
                        costs,
                        training=self.prices.training,
                    )
                    for worker in self._workers
                ]
            )
            for node, seconds in zip(members, (rows * counts).T, strict=True):
                found[node][kind] = seconds
        return found

    def _label_costs(self, number: int, along: Mapping[int, Floats], shares: Floats) -> Iterator[LabelCost]:
        node, nothing = self.classes.nodes[number], np.zeros(len(self._workers))
        for label in node.labels:
            kinds = frozenset({label.work, label.scattered}) - {WHOLE}
            if node.first.kind != "call":
                stepping = self._optimizer_seconds(number, label, shares)
                yield LabelCost(tuple(along[WHOLE]), fixed=stepping, kinds=kinds)
                continue
            sums = len(node.ops) * self._sum_seconds(node.first, label)
            divides = label.work != WHOLE and self._counts(node.first, label)
            yield LabelCost(tuple(along.get(label.work, nothing)), label.work, sums, kinds, divides)

    def _optimizer_seconds(self, number: int, label: Label, shares: Floats | None) -> float:
        """Seconds of stepping the parameters of a node, per micro-batch, on the slowest device."""
        node = self.classes.nodes[number]
        if node.first.kind != "parameter" or not node.first.requires_grad or not self.prices.training:
            return 0.0
        held = sum(op.num_bytes for op in node.ops)
        times = []
        for worker in self._workers:
            own = held * (shares[label.work, worker.position] if shares is not None and label.work != WHOLE else 1.0)
            times.append(optimizer_seconds(worker.device, own, own, own * self.prices.costs.optimizer_states))
        return max(times) / self.site.num_micro_batch

    def _counts(self, op: Op, label: Label) -> bool:
        """Whether work on parts divides arithmetic or a parameter."""
        axis = self.classes.work(op.name, label)
        if axis == BATCH:
            return False
        graph = self.prices.graph
        reads = any(graph.by_name[name].kind == "parameter" and axis in self.classes.scene.axes_in(name) for name in op.inputs)
        return reads or (op.requires_grad and op.backward_flops > 0)

    def _sum_seconds(self, op: Op, label: Label) -> float:
        axis = self.classes.work(op.name, label)
        if axis is None or (role := self.classes.scene.role(op.name, axis)).kind != "contracted":
            return 0.0
        target = "scattered" if label.scattered != WHOLE else None
        bridge = Bridge(op.name, None, target, is_sum=True, has_gradient=op.requires_grad, combine=role.combine)
        forward, backward = self._collective_costs.both_ways(bridge)
        return (forward + backward).at(self.site.num_rows)

    @cached_property
    def _crossed(self) -> tuple[tuple[Tensors, TensorCost], ...]:
        """The tensors with possible bridges, and the costs of these."""
        both = zip(self.classes.tensors, self.classes.bridges, strict=True)
        return tuple((tensors, self._tensor_cost(tensors, bridges)) for tensors, bridges in both if bridges)

    def _tensor_cost(self, tensors: Tensors, bridges: Mapping[tuple[int, Use], Bridge]) -> TensorCost:
        once, rows = 0.0, self.site.num_rows
        if tensors.first.kind == "parameter" and tensors.first.requires_grad and self.prices.training:
            once = tensors.count * self._collective_costs.synchronized(tensors.first).at(rows)
        found = {}
        for place, bridge in bridges.items():
            forward, backward = (line.at(rows) * tensors.count for line in self._collective_costs.both_ways(bridge))
            found[place] = BridgeCost(forward, backward, bool(bridge.forward))
        return TensorCost(tensors.node, tensors.forms, tensors.users, found, once)


def _workers(prices: Prices, site: StagePlace) -> Iterator[PlacedDevice]:
    """Per position, its distinct devices in the groups."""
    for position in range(site.width):
        devices = (prices.cluster.by_name[group[position]] for group in site.groups)
        yield from (PlacedDevice(position, device) for device in {device.kind: device for device in devices}.values())
