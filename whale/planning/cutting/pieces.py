"""Cost of any contiguous piece of the model on a device type, as the difference of prefix sums over the cut points.

Used by the cut of a pipeline and the closed form of a step. For a split stage, each device has the part that the sharding
pass gives it of the whole model, or of one repeated block with its surroundings, and the exchanges of its group.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.errors import WhaleError
from whale.estimate import OpTable, op_seconds
from whale.estimate.costs.compute import copy_seconds
from whale.estimate.costs.line import Floats
from whale.estimate.memory.held import kept_by_maker
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.collective_costs import CollectiveCosts, StagePlace
from whale.estimate.prices.part import Alive, Part
from whale.estimate.prices.prices import Prices
from whale.estimate.prices.repeated import RepeatedBridges
from whale.ir.blocks import find_repeated_blocks
from whale.ir.cluster import Device, Host
from whale.planning.pipeline.cut_points import CutPoints, PieceBytes, piece_bytes
from whale.planning.pipeline.placement import Likeness
from whale.planning.shard.memory import MemoryBudget, capacity_of
from whale.planning.shard.sharding import Sharder
from whale.planning.shard.space import Scene
from whale.planning.strategy import Placed
from whale.sharding.bridges import Bridge

SPARE = 1.25
"""With little memory a device of a split group has at most this multiple of its even part. Halved or doubled: none of 22 plans differs;
doubled, the searches make a tenth more.
"""

NUM_BLOCKS = 3  # with more repeated blocks only one of them is sharded, and stands for all; with 2 or 6 none of 22 plans differs


@dataclass(frozen=True, slots=True)
class PrefixSums:
    """Per cut point, seconds of all ops before it for a micro-batch, as lines (fixed, per row) about some number of rows."""

    forward: Floats  # on the device, with exchanges of its split group: ``[2, places]``
    backward: Floats  # the same
    weights: Floats  # the weight-gradient part of `backward`
    started_forward: Floats  # host time of starting the kernels: ``[places]``
    started_backward: Floats  # the same
    waiting: Floats  # number of ops with deferrable weight gradients
    away: Floats  # the part of `forward`, and of `backward`, that offloads activations


@dataclass(eq=False)
class _Columns:
    """The ops of a graph, equal ones merged into one column, so that the number does not grow with the depth."""

    prices: Prices  # of the whole graph, or of one device's part
    table: OpTable  # one op of each column
    firsts: NDArray[np.int64]  # their positions in the graph
    before: Floats  # number of ops of each column before each place: ``[places, columns]``
    collective_costs: Floats  # seconds of a split group's exchanges before each place, forward and backward: ``[2, 2, places]``
    started: Floats  # the same of the host: ``[2, places]``
    trained: Floats  # bytes on a device of trainable parameters (at their first reader), and of their gradients: ``[2, places]``
    held: PieceBytes  # of a device
    budget: Budget

    def sums(self, kind: Device, rows: float) -> PrefixSums:
        found, prices = op_seconds(self.table, kind, rows, self.prices.costs), self.prices
        training, share = float(prices.training), prices.weight_shares[self.firsts]
        backward = (found.backward_fixed + prices.adding(kind)[self.firsts]) * training, found.backward_per_row * training
        own = np.stack(
            [
                found.forward_fixed,
                found.forward_per_row,
                *backward,
                backward[0] * share,
                backward[1] * share,
                found.forward_host,
                found.backward_host * training,
                (share > 0) * training,
                *(copy_seconds(kind, 1.0) * prices.first_kept[:, self.firsts]),
            ],
            axis=1,
        )
        sums = (self.before @ own).T
        away = sums[9:11]
        forward, back = sums[:2] + self.collective_costs[0] + away, sums[2:4] + self.collective_costs[1] + away
        brought, overlapped = prices.bringing(kind, self.trained[0], self.budget)
        forward[0] += brought
        back[0] += brought * training
        started = [np.maximum(own, overlapped) for own in (sums[6] + self.started[0], sums[7] + self.started[1])]
        return PrefixSums(forward, back, sums[4:6], started[0], started[1], sums[8], away)


@dataclass(frozen=True, slots=True)
class _Split:
    """How split groups of one width hold the model: bridges, and the columns of one device without them."""

    bridges: tuple[Bridge, ...]
    columns: _Columns


@dataclass(eq=False)
class Pieces:
    """The prefix sums of one model."""

    prices: Prices
    points: CutPoints
    num_rows: int
    budget: Budget = ALL
    sharder: Sharder | None = None  # that others share; None for one of its own
    cuts: dict[Hashable, tuple[int, ...]] = field(default_factory=dict, init=False)  # the best cuts without memory limits
    times: dict[Hashable, Floats] = field(default_factory=dict, init=False)  # cache of all pieces as some stage
    lists: dict[Hashable, list[float]] = field(default_factory=dict, init=False)
    looks: dict[Placed, Likeness] = field(default_factory=dict, init=False)  # of replicas, by their devices
    _columns: dict[tuple[Device, int, Hashable], _Columns | None] = field(default_factory=dict, init=False)
    _sums: dict[tuple[Device, int, Hashable, float], PrefixSums] = field(default_factory=dict, init=False)
    _hosts: dict[tuple[Device, int], Host | None] = field(default_factory=dict, init=False)
    _splits: dict[tuple[int, bool], _Split | None] = field(default_factory=dict, init=False)

    def sums(self, kind: Device, width: int, rows: float, host: str | None = None) -> PrefixSums:
        """The sums of a device of a split group, about a group's rows of a micro-batch.

        `host`: None for the one with the slowest links among those that fit the group.
        """
        key = kind, width, self._look(kind, width, host), rows
        if key not in self._sums:
            self._sums[key] = self._known(kind, width, host).sums(kind, rows)
        return self._sums[key]

    def trained(self, kind: Device, width: int) -> Floats:
        """Per place, bytes on a device of trainable parameters before it, each at its first reader."""
        found: Floats = self._known(kind, width).trained[0]
        return found

    def gradients(self, kind: Device, width: int) -> Floats:
        """The same of their gradients."""
        found: Floats = self._known(kind, width).trained[1]
        return found

    def held(self, kind: Device, width: int) -> PieceBytes:
        """What a device of a split group holds."""
        return self._known(kind, width).held

    def can_split(self, kind: Device, width: int, host: str | None = None) -> bool:
        """Whether something of the model can be cut over so many devices of a type on this host, or with None on any."""
        return self._of(kind, width, host) is not None

    def _known(self, kind: Device, width: int, host: str | None = None) -> _Columns:
        found = self._of(kind, width, host)
        assert found is not None, "asked for a split that there is none of"
        return found

    def _look(self, kind: Device, width: int, host: str | None) -> Hashable:
        """Equal for hosts on which a split group exchanges equally fast."""
        if width == 1:
            return None
        own = self._host(kind, width) if host is None else self.prices.cluster.host_by_name[host]
        return None if own is None else (own.link, own.link.shared and len(own.devices))

    def _host(self, kind: Device, width: int) -> Host | None:
        """The host with the slowest link among those that fit a split group; None where there is none."""
        key = kind, width
        if key not in self._hosts:
            having = [host for host in self.prices.cluster.hosts if sum(own.kind == kind for own in host.devices) >= width]
            self._hosts[key] = min(
                having, key=lambda host: host.link.bandwidth / (len(host.devices) if host.link.shared else 1), default=None
            )
        return self._hosts[key]

    def _of(self, kind: Device, width: int, host: str | None) -> _Columns | None:
        if width == 1:
            kind = self.prices.cluster.devices[0].kind
        key = kind, width, self._look(kind, width, host)
        if key not in self._columns:
            self._columns[key] = self._split(kind, width, host) if width > 1 else self._made(self.prices)
        return self._columns[key]

    def _made(
        self,
        prices: Prices,
        alike: NDArray[np.int64] | None = None,
    ) -> _Columns:
        """Columns of a graph, without exchanges; `alike`: per op, the op whose figures stand for it, None for itself."""
        points, table = self.points, prices.table
        own = prices.positions(points.spine)
        stands = own if alike is None else alike[own]
        bound = np.array([name not in points.floating for name in points.spine])
        arrays = {
            each.name: getattr(table, each.name) for each in dataclasses.fields(table) if isinstance(getattr(table, each.name), np.ndarray)
        }
        figures = [
            values[stands].astype(np.float64) for name, values in arrays.items() if name != "op" or prices.costs.measured is not None
        ]
        first = prices.cluster.devices[0]
        looks = np.stack([*figures, prices.adding(first)[stands], prices.weight_shares[stands]], axis=1)
        _, unlike, column = np.unique(looks, axis=0, return_index=True, return_inverse=True)
        ops = np.zeros((len(own) + 1, len(unlike)))
        places = np.flatnonzero(bound)
        ops[places + 1, column.reshape(-1)[places]] = 1.0
        kept = stands[unlike]

        nothing = np.zeros((2, 2, len(points.bounds)))
        return _Columns(
            prices,
            dataclasses.replace(table, **{name: values[kept] for name, values in arrays.items()}),
            kept,
            np.cumsum(ops, axis=0)[points.bounds],
            nothing,
            nothing[0],
            np.concatenate((np.zeros((2, 1)), np.cumsum(self._trained(prices, stands) * bound, axis=1)), axis=1)[:, points.bounds],
            points.held if alike is None else self._held(prices, alike),
            self.budget,
        )

    def _before(self, per_op: Floats, alike: NDArray[np.int64] | None) -> Floats:
        """Per cut point, sums over the ops before it; floating ops do not count."""
        points, own = self.points, self.prices.positions(self.points.spine)
        bound = np.array([name not in points.floating for name in points.spine])
        values = per_op[..., own if alike is None else alike[own]] * bound
        found: Floats = np.concatenate((np.zeros((*per_op.shape[:-1], 1)), np.cumsum(values, axis=-1)), axis=-1)
        return found[..., points.bounds]

    def _held(self, prices: Prices, alike: NDArray[np.int64]) -> PieceBytes:
        """What a device with these prices of its part holds, without copies."""
        points, graph, there = self.points, self.prices.graph, [prices.graph.ops[place] for place in alike.tolist()]
        places = [graph.position[name] for name in points.spine]
        made = kept_by_maker(graph, [prices.outputs[op.name] for op in there], self.prices.kept_there)[:, places]
        read = [
            [
                (own.name, prices.parameter_bytes(local.name, self.budget))
                for own, local in zip(
                    graph.parameters_among(graph.ops[place].inputs), prices.graph.parameters_among(there[place].inputs), strict=True
                )
            ]
            for place in places
        ]
        return piece_bytes(read, made, points.bounds)

    def _trained(self, prices: Prices, stands: NDArray[np.int64]) -> Floats:
        """Per op of the spine, bytes of the trainable parameters that it reads first, and of their gradients."""
        seen, graph = set[str](), self.prices.graph
        found = np.zeros((2, len(self.points.spine)))
        local = {position: prices.graph.ops[position] for position in set(stands.tolist())}
        for index, name in enumerate(self.points.spine):
            new = [each for each in graph.parameters_among(graph.by_name[name].inputs) if each.name not in seen]
            if not new:
                continue
            seen.update(each.name for each in new)
            there = prices.graph.parameters_among(local[int(stands[index])].inputs)
            share = sum(each.spec.num_bytes for each in there) / max(
                1, sum(p.spec.num_bytes for p in graph.parameters_among(graph.by_name[prices.graph.ops[int(stands[index])].name].inputs))
            )
            found[0, index] = share * sum(each.spec.num_bytes for each in new if each.kind == "parameter" and each.trainable)
            found[1, index] = share * sum(self.prices.held(each.name).gradient for each in new)
        return found

    @cached_property
    def _sample(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """The calls that are sharded, and per op of the graph the one that stands for it."""
        graph = self.prices.graph
        alike, run = np.arange(len(graph.ops)), find_repeated_blocks(graph)
        calls = [op for op in graph.ops if op.kind == "call"]
        if run is None or run.count <= NUM_BLOCKS:
            return tuple(op.name for op in calls), alike
        own = run.calls[run.start + run.length : run.start + 2 * run.length]
        for block in range(run.count):
            start = run.start + block * run.length
            for op, first in zip(run.calls[start : start + run.length], own, strict=True):
                alike[graph.position[op.name]] = graph.position[first.name]
        outside = {op.name for op in (*run.calls[: run.start], *own, *run.calls[run.stop :])}
        return tuple(op.name for op in calls if op.name in outside), alike

    def _split(self, kind: Device, width: int, host: str | None) -> _Columns | None:
        """Columns of one device of a split group; None where nothing can be cut.

        Where the whole model does not fit on such a group in the fastest way, the fastest with which each device holds little more
        than its part: gathered and kept copies are limited.
        """
        own = self._host(kind, width) if host is None else self.prices.cluster.host_by_name[host]
        group = tuple(device.name for device in own.devices if device.kind == kind)[:width] if own else ()
        if len(group) < width:
            return None
        speed = width / self.whole_seconds(kind, 1, float(self.num_rows))
        rows = max(1.0, self.num_rows * speed / self.cluster_speed)  # if all take a part of one micro-batch
        found, room = None, self.prices.room(kind)
        for is_short in (False, True) if self.points.held.whole_at(rows) <= width * room else (True,):
            cut = self._shared(group, rows, is_short=is_short)
            if cut is None:
                return found
            found = self._paid(cut, StagePlace((group,), rows, 1, 1))
            if found.held.whole_at(rows) <= room:
                return found
        return found

    def whole_seconds(self, kind: Device, width: int, rows: float) -> float:
        """Seconds of the whole model on a device of a split group, for a micro-batch of so many rows."""
        sums = self.sums(kind, width, rows)
        device, host = sums.forward[:, -1] + sums.backward[:, -1], sums.started_forward[-1] + sums.started_backward[-1]
        return max(float(device[0] + rows * device[1]), float(host), 1e-30)

    @cached_property
    def cluster_speed(self) -> float:
        """1 / seconds in which all devices together process all rows."""
        counts = Counter(self.prices.kinds.values())
        return sum(number / self.whole_seconds(kind, 1, float(self.num_rows)) for kind, number in counts.items())

    def _shared(self, group: tuple[str, ...], rows: float, *, is_short: bool) -> _Split | None:
        """The sharding of groups of this width, chosen by the first that asks, for all device types; None where nothing can be cut."""
        key = len(group), is_short
        if key not in self._splits:
            self._splits[key] = self._solved(StagePlace((group,), rows, 1, 1), is_short=is_short)
        return self._splits[key]

    def _solved(self, site: StagePlace, *, is_short: bool) -> _Split | None:
        prices, graph, (ops, alike) = self.prices, self.prices.graph, self._sample
        inside, budget = set(ops), MemoryBudget(0.0, 1, capacity_of(site, prices, self.budget), plan=self.budget)
        if is_short:
            part = Part(ops, tuple(graph.parameters_read(ops)), ())
            held = prices.part(part, site.num_rows, budget=self.budget).held(Alive(1)).at(site.num_rows)
            room = prices.capacity(site.groups[0][0])
            budget = dataclasses.replace(budget, num_bytes=held, share=SPARE * held / site.width / room)
        read = {name for own in ops for name in graph.by_name[own].inputs if graph.by_name[name].kind == "call"}
        handed_on = {name for name in ops if any(user not in inside for user in graph.users[name])}
        scene = Scene(graph, prices.axes, ops, frozenset(read - inside), frozenset(handed_on))
        try:
            shards = self._sharder.choose(scene, site, budget).shards
        except WhaleError:
            return None
        bridges, copies = prices.bridges(ops, shards, scene.returned), np.zeros((2, len(graph.ops)))
        repeating = RepeatedBridges(prices, prices.labels(ops, shards), bridges, (), handed_on)
        for form in repeating.forms(0):
            if form.is_kept:  # beside what ops keep of their own parts
                copies[:, graph.position[form.users[0]]] += form.num_bytes.real, form.num_bytes.imag
        columns = self._made(prices.local(ops, shards, 0), alike)
        return _Split(bridges, dataclasses.replace(columns, held=columns.held.with_kept(self._before(copies, alike))))

    def _paid(self, cut: _Split, site: StagePlace) -> _Columns:
        """Columns of a device of a group, with exchanges."""
        prices, graph, collective_costs = self.prices, self.prices.graph, CollectiveCosts(self.prices, site)
        paid, started = np.zeros((2, 2, len(graph.ops))), np.zeros((2, len(graph.ops)))
        for bridge in cut.bridges:  # a parameter's is paid by the op that reads it
            place = graph.position[bridge.tensor if graph.by_name[bridge.tensor].kind == "call" else bridge.users[0]]
            for way, each in enumerate(collective_costs.started((bridge,), prices.kinds[site.groups[0][0]])):
                paid[way, :, place] += each.device.fixed, each.device.per_row
                started[way, place] += each.host
        _, alike = self._sample
        return dataclasses.replace(cut.columns, collective_costs=self._before(paid, alike), started=self._before(started, alike))

    @cached_property
    def _sharder(self) -> Sharder:
        return self.sharder or Sharder(self.prices)
