"""What every label of every class of ops costs on the devices of a split group, and every bridge between them.

For n units of an axis on a device, of a micro-batch:

    op, whole          all of its time, on every device
    op along an axis   arithmetic falls to n / size, traffic by what has the axis; what it contracts is summed, at once or
                       (scattered) half now and half backward
    tensor             each form in which it is used and does not lie is one bridge, shared by the users of that form
    parameter          where only work on parts uses a whole one, its gradient is summed once per step; the optimizer steps
                       what a device holds
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.estimate import optimizer_seconds
from whale.estimate.costs.op_table import Floats, is_free
from whale.estimate.prices.prices import Prices
from whale.estimate.prices.tolls import Site, Tolls
from whale.estimate.prices.traffic import CutTraffic, cut_traffic
from whale.ir.cluster import Device
from whale.ir.graph import Op
from whale.ir.plan import BATCH
from whale.planning.shard.classes import WHOLE, Classes, Label, Tensors, Use
from whale.planning.shard.held import NOTHING_REPEATED, Divisible, Held, Repeated
from whale.planning.shard.program import LabelFigures, Pair, Program, Selection, TensorFigures, UserFigures
from whale.planning.shard.solve import solve
from whale.sharding.bridges import Bridge

GRID = 33
"""Times by units are computed at this many points and lie on lines between them."""

BOUNDLESS = 2**62
"""Bytes that nothing overflows."""

Sizes = tuple[tuple[int, ...], ...]
"""Per kind, the units of each position."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a device of a stage holds.

    Attributes:
        num_bytes: if nothing is cut, but for what ops work on.
        in_flight: micro-batches whose activations are held.
        taken: bytes of the device's memory that are for its other stages.
        share: of the rest, how much is for this stage: other split stages of the device have theirs.
        repeated: what is computed again.
    """

    num_bytes: float
    in_flight: int
    taken: float = 0.0
    share: float = 1.0
    repeated: Repeated = NOTHING_REPEATED

    @property
    def repetition(self) -> Hashable:
        """Of two loads with equal ones, of which something is computed again, labels hold the same bytes."""
        return self.repeated, self.share, self.in_flight if self.repeated.num_alive else 1

    def capacity(self, memory: int) -> int:
        """Bytes that the stage may use of a device's memory; below nothing where its other stages overflow it."""
        return int((memory - self.taken) * self.share)


@dataclass(frozen=True)
class Worker:
    """A device as it is met at one position of the groups."""

    position: int
    device: Device


@dataclass(frozen=True, slots=True)
class AtLabel:
    """What a node does at one of its labels, whatever the sizes.

    Attributes:
        sums: seconds of combining its results.
        kinds: that it makes use of.
        divides: whether it divides arithmetic or parameters.
    """

    sums: float
    kinds: frozenset[int]
    divides: bool


class Figures:
    """Prices of one stage at one site.

    Args:
        classes: of the stage.
        prices: of the graph on the cluster.
        site: the devices, and the rows they take.
    """

    def __init__(self, classes: Classes, prices: Prices, site: Site) -> None:
        self.classes, self.prices, self.site = classes, prices, site
        self.tolls = Tolls(prices, site)
        self.workers = tuple(_workers(prices, site))
        self._held: dict[Repeated, Held] = {}
        self._programs: dict[tuple[Sizes, tuple[int, ...], Hashable], Program] = {}
        self._found: dict[tuple[Sizes, tuple[int, ...], frozenset[int] | None], Selection | None] = {}
        self._fitting: dict[tuple[Sizes, tuple[int, ...], frozenset[int] | None, Repeated], list[tuple[Program, Selection]]] = {}
        self._by_share: dict[tuple[int, Device], Floats] = {}
        self._curves: dict[tuple[int, frozenset[int] | None], tuple[Floats, ...]] = {}
        self.capacity = tuple(min(prices.capacity(group[position]) for group in site.groups) for position in range(site.width))

    @cached_property
    def whole(self) -> float:
        """Seconds of the stage if nothing is cut, on the slowest device."""
        stepping = sum(self._optimizer_seconds(number, Label(), None) for number in range(len(self.classes.nodes)))
        return float(np.max(np.sum(self._whole_seconds, axis=0))) + stepping

    @cached_property
    def _whole_seconds(self) -> tuple[Floats, ...]:
        """Per node, per worker, seconds of its members run whole."""
        index = [
            [self.prices.table.position[name] for op in node.ops for name in self.classes.members[op.name]] for node in self.classes.nodes
        ]
        found = np.zeros((len(index), len(self.workers)))
        for number, worker in enumerate(self.workers):
            seconds = self.prices.seconds(worker.device, self.site.num_rows)
            forward = seconds.forward_fixed + self.site.num_rows * seconds.forward_per_row
            both = forward + seconds.backward_fixed + self.site.num_rows * seconds.backward_per_row
            found[:, number] = [both[own].sum() for own in index]
        return tuple(found)

    @cached_property
    def _traffic(self) -> dict[int, tuple[tuple[int, ...], CutTraffic]]:
        """Per kind, the nodes that may work along it, and their first ops as a table."""
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

    def size(self, kind: int) -> int:
        """Units of the axes of a kind."""
        return self.prices.axes.by_name[self.classes.space.kinds[kind][0]].size

    def curves(self, kind: int, nodes: frozenset[int] | None = None) -> tuple[Floats, ...]:
        """Per position, seconds of the ops along a kind by units held, 0 to its size.

        Args:
            nodes: those that work along it; None for all that may.
        """
        if (kind, nodes) not in self._curves:
            self._curves[kind, nodes] = self._curves_of(kind, nodes)
        return self._curves[kind, nodes]

    def _curves_of(self, kind: int, nodes: frozenset[int] | None) -> tuple[Floats, ...]:
        size = self.size(kind)
        shares = np.linspace(0.0, 1.0, min(GRID, size + 1))
        found: dict[int, Floats] = {}
        known: dict[object, Floats] = {}
        for worker in self.workers:
            key = worker.device.kind
            if key not in known:
                times = self._seconds_along(kind, worker.device, shares, nodes)
                known[key] = np.maximum.accumulate(np.interp(np.arange(size + 1) / size, shares, times))
            found[worker.position] = np.maximum(found.get(worker.position, 0.0), known[key])
        return tuple(found[position] for position in range(self.site.width))

    def _seconds_along(self, kind: int, device: Device, shares: Floats, nodes: Collection[int] | None) -> Floats:
        """Per share of the axes, seconds of the ops along a kind."""
        if kind not in self._traffic:
            return shares
        members, traffic = self._traffic[kind]
        key = kind, device.kind
        if key not in self._by_share:
            tiled = np.tile(shares[:, None], len(members))
            self._by_share[key] = traffic.seconds(device, self.site.num_rows, tiled, self.prices.costs, training=self.prices.training)
        seconds = self._by_share[key]
        counts = np.array(
            [len(self.classes.nodes[node].ops) if nodes is None or node in nodes else 0 for node in members], dtype=np.float64
        )
        return np.array([own @ counts for own in seconds])

    def program(self, sizes: Sizes, insisted: tuple[int, ...], load: Load | None = None) -> Program:
        """The problem with the sizes of every kind fixed.

        Args:
            insisted: kinds along which every op works that may.
            load: what the devices hold; None where memory is no matter.
        """
        again = None if load is None or not load.repeated else load
        key = sizes, insisted, None if again is None else again.repetition
        if key not in self._programs:
            self._programs[key] = self._program(sizes, insisted) if again is None else self._repeating(sizes, insisted, again)
        found = self._programs[key]
        if load is None:
            return found
        capacity = tuple(map(load.capacity, self.capacity))
        return replace(found, num_bytes=load.num_bytes, in_flight=load.in_flight, capacity=capacity, working_share=load.share)

    def _program(self, sizes: Sizes, insisted: Collection[int]) -> Program:
        shares = self._shares(sizes)
        along = self._times(shares)
        nodes = tuple(tuple(self._labels(number, along, shares)) for number in range(len(self.classes.nodes)))
        tensors = tuple(self._tensor(each, shares) for _, each in self._crossed)
        return Program(nodes, tensors, len(sizes), 0.0, (BOUNDLESS,) * self.site.width, tuple(self._insisted(insisted)))

    def _shares(self, sizes: Sizes) -> NDArray[np.float64]:
        """Per kind, per position, what devices have of the axes."""
        return np.array([np.array(own) / self.size(kind) for kind, own in enumerate(sizes)]).reshape(len(sizes), self.site.width)

    def _repeating(self, sizes: Sizes, insisted: tuple[int, ...], load: Load) -> Program:
        """The same problem where something is computed again: less is kept, and fewer copies, in the same seconds."""
        program, shares, held = self.program(sizes, insisted), self._shares(sizes), self._held_where(load.repeated)
        nodes = tuple(
            tuple(
                replace(label, num_bytes=num_bytes, kept=kept)
                for label, (num_bytes, kept) in zip(labels, (self._held_bytes(each, shares, load.share) for each in own), strict=True)
            )
            for labels, own in zip(program.nodes, held.divisible, strict=True)
        )
        pairs = zip((tensors for tensors, _ in self._crossed), program.tensors, strict=True)
        tensors = tuple(_with_kept(held, tensors, figures, load.in_flight) for tensors, figures in pairs)
        return replace(program, nodes=nodes, tensors=tensors)

    def _held_where(self, repeated: Repeated) -> Held:
        if repeated not in self._held:
            self._held[repeated] = Held(self.classes, self.prices, self.site.num_rows, repeated)
        return self._held[repeated]

    def best(
        self, sizes: Sizes, insisted: tuple[int, ...], load: Load | None = None, other_than: frozenset[int] | None = None
    ) -> Selection | None:
        """The best labels at some sizes: the fastest of all where these fit, else the fastest that fit.

        Args:
            load: what the devices hold; None where memory is no matter.
            other_than: a set of kinds that is not to be found again.
        """
        key = sizes, insisted, other_than
        if key not in self._found:
            self._found[key] = solve(self.program(sizes, insisted), other_than)
        found = self._found[key]
        if found is None or load is None:
            return found
        within, fitting = self.program(sizes, insisted, load), self._fitting.setdefault((*key, load.repeated), [])
        for roomier, best in [(None, found), *fitting]:  # what is best of more is best of fewer, if it is among them
            placed = within.evaluate(best.labels) if roomier is None or roomier.has_room_of(within) else None
            if placed is not None and placed.excess <= 0:
                return replace(placed, gap=best.gap)
        again = solve(within, other_than)
        if again is not None and again.excess <= 0:
            fitting.append((within, again))
        return again

    def _insisted(self, kinds: Collection[int]) -> Iterator[tuple[int, int]]:
        for number, node in enumerate(self.classes.nodes):
            for kind in kinds:
                if node.first.kind == "call" and any(label.work == kind for label in node.labels):
                    yield number, kind

    def _times(self, shares: NDArray[np.float64]) -> dict[tuple[int, int], Floats]:
        """Per kind and node, per worker, seconds of its members on parts."""
        found: dict[tuple[int, int], Floats] = {}
        for kind, (members, traffic) in self._traffic.items():
            counts = np.array([len(self.classes.nodes[node].ops) for node in members], dtype=np.float64)
            rows = []
            for worker in self.workers:
                own = np.full(len(members), shares[kind, worker.position])
                rows.append(
                    counts * traffic.seconds(worker.device, self.site.num_rows, own, self.prices.costs, training=self.prices.training)
                )
            for column, node in enumerate(members):
                found[kind, node] = np.array([row[column] for row in rows])
        return found

    def _labels(self, number: int, along: Mapping[tuple[int, int], Floats], shares: NDArray[np.float64]) -> Iterator[LabelFigures]:
        node = self.classes.nodes[number]
        nothing = np.zeros(len(self.workers))
        is_call = node.first.kind == "call"
        held = self._held_where(NOTHING_REPEATED)
        for label, known, divisible in zip(node.labels, self._at_labels[number], held.divisible[number], strict=True):
            lane = label.work if is_call else WHOLE
            seconds = along.get((lane, number), nothing) if lane != WHOLE else self._whole_seconds[number]
            num_bytes, kept = self._held_bytes(divisible, shares)
            yield LabelFigures(
                seconds=tuple(seconds),
                lane=lane,
                fixed=known.sums if is_call else self._optimizer_seconds(number, label, shares),
                num_bytes=num_bytes,
                kinds=known.kinds,
                divides=known.divides,
                kept=kept,
                working=tuple(held.working(number, label, shares)) if is_call else (),
            )

    @cached_property
    def _at_labels(self) -> tuple[tuple[AtLabel, ...], ...]:
        return tuple(tuple(self._at_label(number, label) for label in node.labels) for number, node in enumerate(self.classes.nodes))

    def _at_label(self, number: int, label: Label) -> AtLabel:
        node = self.classes.nodes[number]
        is_call = node.first.kind == "call"
        return AtLabel(
            sums=len(node.ops) * self._sum_seconds(node.first, label) if is_call else 0.0,
            kinds=frozenset({label.work, label.scattered}) - {WHOLE},
            divides=is_call and label.work != WHOLE and self._counts(node.first, label),
        )

    def _optimizer_seconds(self, number: int, label: Label, shares: NDArray[np.float64] | None) -> float:
        """Seconds of stepping the parameters of a node, per micro-batch of the step, on the slowest device."""
        node = self.classes.nodes[number]
        if node.first.kind != "parameter" or not node.first.requires_grad or not self.prices.training:
            return 0.0
        held = sum(op.num_bytes for op in node.ops)
        times = []
        for worker in self.workers:
            share = shares[label.work, worker.position] if shares is not None and label.work != WHOLE else 1.0
            own = held * share
            times.append(optimizer_seconds(worker.device, own, own, own * self.prices.costs.optimizer_states))
        return max(times) / self.site.num_micro_batch

    def _counts(self, op: Op, label: Label) -> bool:
        """Whether work on parts divides something worth it: arithmetic, or a parameter."""
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
        forward, backward = self.tolls.both_ways(bridge)
        return (forward + backward).at(self.site.num_rows)

    def _held_bytes(
        self, divisible: Divisible, shares: NDArray[np.float64], share: float = 1.0
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per position, what a label holds more or less than if everything were whole: at all times, and per micro-batch in flight.

        Args:
            share: of what is computed again, how much is this stage's.
        """

        def saved(held: Sequence[tuple[int, float]]) -> tuple[float, ...]:
            positions = range(self.site.width)
            return tuple(sum(-num_bytes * (1 - shares[kind, position]) for kind, num_bytes in held) for position in positions)

        again = tuple((kind, share * num_bytes) for kind, num_bytes in divisible.again)
        return saved((*divisible.held, *again, *divisible.waiting)), saved(divisible.kept) if divisible.kept else ()

    def held_at(self, labels: Sequence[int], insisted: tuple[int, ...], load: Load) -> tuple[float, float]:
        """Bytes that a device of the stage holds at some labels (indices) with no unit of any axis, and with all of them."""
        ends = (
            tuple((units,) * self.site.width for units in own) for own in zip(*((0, self.size(kind)) for kind in self.kinds), strict=True)
        )
        none, every = (float(self.program(sizes, insisted, load).held(labels).max()) for sizes in ends)
        return none, every

    @property
    def kinds(self) -> range:
        """The kinds of axes that may be cut."""
        return range(len(self.classes.space.kinds))

    @cached_property
    def _crossed(self) -> tuple[tuple[Tensors, TensorFigures], ...]:
        """The tensors that bridges can stand at, with what these cost; copies as if every device had all of the new form."""
        both = zip(self.classes.tensors, self.classes.bridges, strict=True)
        found = ((tensors, self._with_bridges(tensors, bridges)) for tensors, bridges in both)
        return tuple((tensors, figures) for tensors, figures in found if figures.pairs)

    def _with_bridges(self, tensors: Tensors, bridges: Mapping[tuple[int, Use], Bridge]) -> TensorFigures:
        users = tuple(UserFigures(user.node, user.uses, user.has_gradient, user.keeps, user.is_rigid) for user in tensors.users)
        once = 0.0
        if tensors.first.kind == "parameter" and tensors.first.requires_grad and self.prices.training:
            once = tensors.count * self.tolls.synchronized(tensors.first).at(self.site.num_rows)
        return TensorFigures(
            tensors.node, tensors.forms, users, {place: self._pair(tensors, bridge) for place, bridge in bridges.items()}, once
        )

    def _pair(self, tensors: Tensors, bridge: Bridge) -> Pair:
        """What a bridge costs."""
        op = tensors.first
        forward, backward = (line.at(self.site.num_rows) * tensors.count for line in self.tolls.both_ways(bridge))
        num_bytes = tensors.count * self._held_where(NOTHING_REPEATED).num_bytes(op.name) if bridge.forward else 0.0
        return Pair(forward, backward, (num_bytes,) * self.site.width, bool(bridge.forward))

    def _tensor(self, figures: TensorFigures, shares: NDArray[np.float64]) -> TensorFigures:
        """The bridges of some alike tensors, whose copies are as large as the parts that devices have."""
        pairs = {(form, use): self._copied(pair, use[0], shares) for (form, use), pair in figures.pairs.items()}
        return TensorFigures(figures.node, figures.forms, figures.users, pairs, figures.once)

    def _copied(self, pair: Pair, kind: int, shares: NDArray[np.float64]) -> Pair:
        if kind == WHOLE or not any(pair.copy):
            return pair
        copy = tuple(num_bytes * shares[kind, position] for position, num_bytes in enumerate(pair.copy))
        return Pair(pair.forward, pair.backward, copy, pair.moves)


def _with_kept(held: Held, tensors: Tensors, figures: TensorFigures, in_flight: int) -> TensorFigures:
    """The bridges of some alike tensors, with the copies that are kept."""
    gathered, others = (held.kept_copies(tensors, in_flight, is_gathered=is_gathered) for is_gathered in (True, False))
    entered = held.is_entered(tensors)
    pairs = {
        (form, use): replace(pair, copy=tuple((gathered if use[0] == WHOLE != form else others) * num_bytes for num_bytes in pair.copy))
        for (form, use), pair in figures.pairs.items()
    }
    users = tuple(replace(user, keeps=user.keeps or entered) for user in figures.users)
    return replace(figures, users=users, pairs=pairs)


def _workers(prices: Prices, site: Site) -> Iterator[Worker]:
    """Per position, its devices in the groups, equal ones once."""
    for position in range(site.width):
        devices = (prices.cluster.by_name[group[position]] for group in site.groups)
        yield from (Worker(position, device) for device in {device.kind: device for device in devices}.values())
