"""Strategies around a division by scopes or written replicas: devices, order, micro-batches, recomputation; and the one where all is set.

Let T_d be the time in which a device d alone would process all rows of what its rank computes. Then

    a rank with all rows        1 / (the sum of 1 / T_d over its devices, which divide the rows)
    a replica with all rows     `pipeline_seconds` of its ranks
    a step                      1 / (the sum of 1 / these over the replicas, which divide the rows)

Messages, gradient sums and copies of the state are left out: the plans ranked first are simulated with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar

from whale.config import Config
from whale.config.keys import Recomputation
from whale.errors import AnnotationError, WhaleError
from whale.estimate import pipeline_seconds
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import Annotations, assign_by_scopes, num_chunks, read_scopes, sizes_in
from whale.planning.pipeline.placement import DevicePool, every_placement, placements
from whale.planning.pipeline.scheduling import PipelineShape, shape_pipeline
from whale.planning.plan import EstimatedPlan, StatedPlan, plan_as_set, planned_as_set
from whale.planning.shard.stage_price import StagePricing
from whale.planning.strategy import Placed, ReplicaSpec, Strategy
from whale.planning.structure.stages import Assignment
from whale.search.form import ClosedForms
from whale.search.freedom import Freedom, Order
from whale.search.objective import Objective
from whale.search.ranking import Ranked, effort_of
from whale.search.space import COMPLETE, host_looks, micro_batch_counts


def is_divided(graph: ModelGraph, config: Config) -> bool:
    """Whether scopes or written replicas say how a model is divided."""
    return bool(config.replicas) or any(op.scope for op in graph.ops)


@dataclass(eq=False)
class OpenSpace:
    """The search space around a division."""

    forms: ClosedForms
    freedom: Freedom
    objective: Objective
    config: Config
    num_strategies: int = field(default=0, init=False)
    _annotated: dict[tuple[int, int], Annotations | None] = field(default_factory=dict, init=False)  # by devices and chunks
    _assigned: dict[tuple[int, int], Assignment] = field(default_factory=dict, init=False)  # the same
    _stages: dict[tuple[int, Order], tuple[PipelineShape, Assignment]] = field(default_factory=dict, init=False)
    _placements: dict[tuple[tuple[Device, ...], Order], tuple[tuple[Placed, ...], ...]] = field(default_factory=dict, init=False)
    _speeds: dict[tuple[int, Order, int, Device, int, int], float] = field(default_factory=dict, init=False)

    takes_ungathered: ClassVar[bool] = False

    @property
    def prices(self) -> Prices:
        return self.forms.planner.prices

    @property
    def first(self) -> Strategy:
        """What is set, defaults for the rest, on all devices."""
        return self._strategy(
            self.prices.cluster.devices, self.freedom.orders[0], self.freedom.micro_batches or 1, self.freedom.policies[0]
        )

    @cached_property
    def _pricing(self) -> StagePricing:
        return StagePricing.of(self.prices, self.config.communication.overlap)

    def realize(self, strategy: Strategy, lacking: Mapping[Device, int] | None = None) -> EstimatedPlan:
        """The plan of a strategy, with so many bytes left free on each device type."""
        pricing = self._pricing.reserving(lacking or {})
        cluster = self.prices.cluster
        if strategy == self.first:
            return plan_as_set(pricing, self.config, self.forms.planner.cuts)
        own = strategy.replicas[0]
        order: dict[str, Any] = {"pipeline.schedule": own.schedule, "pipeline.num_chunks": own.num_chunks} if self._has_order else {}
        config = self.config.with_values({"pipeline.num_micro_batch": own.num_micro_batch, "recompute.policy": own.recompute} | order)
        placed = tuple(replica.names for replica in strategy.replicas if replica.names is not None)
        taken = cluster.only([device.name for device in strategy.devices or ()])
        pool = DevicePool(cluster, taken, partial(self._together, strategy), stated=placed)
        return plan_as_set(pricing, config, self.forms.planner.cuts, pool)

    def known(self, start: Sequence[Strategy]) -> Iterator[Ranked]:
        """The plan without a search, so that the result is never worse."""
        yield Ranked(self.first, 0.0, effort_of(self.first))

    def ranked(self) -> Iterator[Ranked]:
        self.num_strategies = len(self._ranked) + 1
        yield from self._ranked

    @cached_property
    def _ranked(self) -> Sequence[Ranked]:
        found = (Ranked(strategy, self._likely(strategy), effort_of(strategy)) for strategy in self._every())
        return sorted(found, key=lambda each: each.value)

    def plain(self, best: Strategy | None) -> Iterator[Ranked]:
        """On each other choice of devices, the strategy that promises most in the order of the best plan."""
        order = self.first if best is None else best
        same = [each for each in self._ranked if self._order_of(each.strategy) == self._order_of(order)]
        yield from sorted({each.strategy.devices: each for each in reversed(same)}.values(), key=lambda each: each.value)

    def spread(self) -> Iterator[Ranked]:
        """None: the scopes, or what is written, say what is split."""
        yield from ()

    def _every(self) -> Iterator[Strategy]:
        fixed, num_rows = self.freedom.micro_batches, self.forms.num_rows
        numbers = micro_batch_counts(num_rows, num_rows) if fixed is None else (fixed,)
        using = self.freedom.using
        subsets = (own for own in self._subsets() if using is None or any(device.kind == using for device in own))
        for devices, policy in product(subsets, self.freedom.policies):
            for order in self._orders(len(devices)):
                for number in numbers:
                    plain = self._strategy(devices, order, number, policy)
                    if self._is_written or len(self.prices.cluster.devices) > COMPLETE:
                        yield plain
                        continue
                    for placed in self._placed(plain):
                        yield replace(plain, replicas=tuple(replace(plain.replicas[0], names=names) for names in placed))

    def _strategy(self, devices: Sequence[Device], order: Order, num_micro_batch: int, policy: Recomputation) -> Strategy:
        own = ReplicaSpec(
            schedule=order.schedule if self._has_order else None,
            num_chunks=order.num_chunks if self._has_order else None,
            num_micro_batch=num_micro_batch,
            recompute=order.policy(policy),
        )
        return Strategy((own,), tuple(devices))

    @property
    def _is_written(self) -> bool:
        return bool(self.config.replicas)

    @cached_property
    def _sizes_asked(self) -> tuple[int, ...]:
        """Devices per virtual device that the scopes make of all devices, in the first order."""
        return self._sizes_in(len(self.prices.cluster.devices), self.freedom.orders[0])

    @cached_property
    def _has_order(self) -> bool:
        """Whether there is more than one stage to order."""
        if not self._is_written:
            return len(self._sizes_asked) > 1
        settings = (dict(block.pipeline).get("num_stages", self.config.pipeline.num_stages) for block in self.config.replicas)
        return any(op.scope for op in self.prices.graph.ops) or any(number not in (None, 1) for number in settings)

    def _orders(self, num_devices: int) -> Iterator[Order]:
        """Orders that keep the same virtual devices; with chunks only where there are more TaskGraphs than devices."""
        if not self._has_order:
            yield self.freedom.orders[0]
            return
        for order in self.freedom.orders:
            if self._is_written or self._sizes(num_devices, order) == self._sizes_asked:
                yield order

    def _subsets(self) -> Iterator[Sequence[Device]]:
        """All devices, then subsets: on few devices any, on many without whole device types.

        A subset must give the same virtual devices as all devices do: otherwise separate TaskGraphs would share devices, or
        scopes without a count would not take all.
        """
        cluster = self.prices.cluster
        if self._is_written:
            yield cluster.devices
            return
        asked, is_small = self._sizes_asked, len(cluster.devices) <= COMPLETE
        groups = dict[Hashable, list[Device]]()
        for device in cluster.devices:
            groups.setdefault((device.kind, device.host, device.price_per_hour) if is_small else device.kind, []).append(device)
        numbers = (range(len(own), -1, -1) if is_small else (len(own), 0) for own in groups.values())
        seen = set[object]()
        for taken in product(*numbers):
            names = {device.name for own, number in zip(groups.values(), taken, strict=True) for device in own[:number]}
            found = tuple(device for device in cluster.devices if device.name in names)
            look = self._look(found)
            if len(names) >= max(1, sum(asked)) and look not in seen and self._sizes(len(names), self.freedom.orders[0]) == asked:
                seen.add(look)
                yield found

    def _sizes(self, num_devices: int, order: Order) -> tuple[int, ...] | None:
        """Devices per virtual device; None where the scopes cannot be honoured."""
        with suppress(AnnotationError):
            return self._sizes_in(num_devices, order)
        return None

    def _sizes_in(self, num_devices: int, order: Order) -> tuple[int, ...]:
        return sizes_in(self._annotations(num_devices, order), num_chunks(self._in(order)))

    def _annotations(self, num_devices: int, order: Order) -> Annotations | None:
        """What the scopes make of so many devices; of an order only its chunks matter."""
        config = self._in(order)
        key = num_devices, num_chunks(config)
        if key not in self._annotated:
            self._annotated[key] = read_scopes(self.prices.graph, config, num_devices)
        return self._annotated[key]

    def _in(self, order: Order) -> Config:
        return self.config.with_values({"pipeline.schedule": order.schedule, "pipeline.num_chunks": order.num_chunks})

    def _look(self, devices: Sequence[Device]) -> object:
        """Equal for subsets that are equivalent: identical devices on equivalent hosts."""
        looks, by_host = host_looks(self.prices.cluster), dict[str, list[object]]()
        for device in devices:
            by_host.setdefault(device.host, []).append((device.kind, device.price_per_hour))
        return frozenset(Counter((looks[host], tuple(own)) for host, own in by_host.items()).items())

    def _placed(self, strategy: Strategy) -> tuple[tuple[Placed, ...], ...]:
        """Placements of the replicas: on few devices all, on many the device types along the pipeline in every order."""
        devices, order = strategy.devices or (), self._order_of(strategy)
        if (devices, order) not in self._placements:
            taken = self.prices.cluster.only([device.name for device in devices])
            pipeline = self._divided(strategy)[0]
            found = tuple(every_placement(taken, pipeline, prefer_intra_node=True))
            found = found or placements(taken, pipeline, [0.0] * pipeline.num_ranks, None, prefer_intra_node=True)
            self._placements[devices, order] = tuple(each.replicas for each in found)
        return self._placements[devices, order]

    def _order_of(self, strategy: Strategy) -> Order:
        own = strategy.replicas[0]
        return Order(own.schedule, own.num_chunks or 1) if own.schedule else self.freedom.orders[0]

    def _divided(self, strategy: Strategy) -> tuple[PipelineShape, Assignment]:
        """What the scopes make of the devices of a strategy; the pipeline's micro-batches do not count."""
        number, order = len(strategy.devices or ()), self._order_of(strategy)
        if (number, order) not in self._stages:
            config, annotations = self._in(order), self._annotations(number, order)
            assert annotations is not None, "of replicas that are written down nothing is known before they are planned"
            key = number, num_chunks(config)
            if key not in self._assigned:
                self._assigned[key] = assign_by_scopes(self.prices.graph, annotations, self.forms.planner.cuts.structure)
            self._stages[number, order] = shape_pipeline(config, annotations, number), self._assigned[key]
        return self._stages[number, order]

    def _likely(self, strategy: Strategy) -> float:
        try:
            seconds = self._of_written(strategy) if self._is_written else self._of_scopes(strategy)
        except WhaleError:
            return math.inf
        return self.objective.likely(strategy, seconds, seconds)

    def _of_written(self, strategy: Strategy) -> float:
        """Seconds of two ranks with the whole model each on the first device: more about written replicas only a plan shows."""
        order, m = self._order_of(strategy), strategy.num_micro_batch
        rank = self.forms.planner.pieces.whole_seconds(self.prices.cluster.devices[0].kind, 1, self.forms.num_rows / m)
        return float(pipeline_seconds(order.schedule, [rank, rank], m, order.num_chunks))

    def _of_scopes(self, strategy: Strategy) -> float:
        """Approximate seconds of a step on the named devices, or on the best placement."""
        named = tuple(replica.names for replica in strategy.replicas if replica.names is not None)
        every = (named,) if named else self._placed(strategy)
        return min((self._together(strategy, placed) for placed in every), default=math.inf)

    def _together(self, strategy: Strategy, placed: Sequence[Placed]) -> float:
        """Seconds of replicas that divide the rows."""
        return 1 / sum(1 / self._with_all_rows(strategy, replica) for replica in placed)

    def _with_all_rows(self, strategy: Strategy, placed: Placed) -> float:
        """Seconds of one replica with all rows."""
        order, m, ranks = self._order_of(strategy), strategy.num_micro_batch, list[float]()
        for rank, names in enumerate(placed):
            kinds = [self.prices.kinds[name] for name in names]
            ranks.append(1 / m / sum(self._speed(strategy, order, rank, kind, len(names)) for kind in kinds))
        return float(pipeline_seconds(order.schedule, ranks, m, order.num_chunks))

    def _speed(self, strategy: Strategy, order: Order, rank: int, kind: Device, number: int) -> float:
        """1 / T_d of a device in a rank of so many devices."""
        m = strategy.num_micro_batch
        key = len(strategy.devices or ()), order, m, kind, rank, number
        if key not in self._speeds:
            (pipeline, assignment), rows = self._divided(strategy), self.forms.num_rows / m
            device, seconds = next(own for own in self.prices.cluster.devices if own.kind == kind), 0.0
            for stage in pipeline.stages_of(rank):
                for each in self.prices.started(assignment.parts[stage], device, rows):
                    seconds += each.line(rows).at(rows)
            self._speeds[key] = 1 / max(m * seconds, 1e-30)
        return self._speeds[key]


@dataclass(frozen=True)
class AsSet:
    """The space of one strategy: what settings, scopes or a written plan say."""

    graph: ModelGraph
    cluster: Cluster
    config: Config
    rows: int | None  # as of `plan_and_estimate`
    num_strategies: ClassVar[int] = 1
    takes_ungathered: ClassVar[bool] = True

    def realize(self, strategy: Strategy) -> EstimatedPlan | StatedPlan:
        return planned_as_set(self.graph, self.cluster, self.config, self.rows)

    def known(self, start: Sequence[Strategy]) -> Iterator[Ranked]:
        yield Ranked(Strategy((ReplicaSpec(),), self.cluster.devices), 0.0, 1.0)

    def ranked(self) -> Iterator[Ranked]:
        yield from ()

    def plain(self, best: Strategy | None) -> Iterator[Ranked]:
        yield from ()

    def spread(self) -> Iterator[Ranked]:
        yield from ()
