"""The strategies of a free space, best first: a family of strategies by a relaxed closed form (the model could be cut anywhere) until it
comes first, then single strategies by the closed form with their cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from whale.config import Config
from whale.config.keys import Choice, Recomputation
from whale.estimate import Costs, estimate
from whale.estimate.costs.line import Floats
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica, Stage
from whale.planning.plan import EstimatedPlan, plan_as_set
from whale.planning.shard.stage_price import StagePricing
from whale.planning.strategy import ReplicaSpec, Strategy
from whale.search.form import ClosedForms
from whale.search.freedom import Freedom, Order
from whale.search.objective import Objective
from whale.search.space import Space

PER_PLAN = 64
"""Devices, or tasks of the simulation, that take about as long as the fixed part of a small plan. Half of it: 5 to 31 % fewer plans,
double: 8 to 38 % more; the results of 4 searches are the same.
"""

# Figures below: of 10 searches of examples/benchmarks/constants.py on 2, 8, 16 and 96 devices.

SPLIT = 6  # how many times longer a plan with split stages takes to make; halved: the same, 8 % more plans, doubled: one is 0.9 % slower

SPREAD = 3  # split groups over several hosts, or of unlike devices, that are planned; 1 or 6: 19 searches make as many, with equal results

FORMS = 2  # closed forms with cuts, per small plan of the effort; halved or doubled: 4 searches make as many plans, with the same results

FEWEST_FORMS = 32
"""Closed forms with cuts, however small the effort: the relaxed ones rank too roughly to plan by. Halved or doubled: one search with the
effort of one plan is slower, by 29 and 21 %.
"""


WORTH = 0.02
"""Share of a step that not recomputing anything must save, for plans to be looked for that shard more state than fits demands. Halved or
doubled: 20 searches of examples/benchmarks/constants.py in short memory are the same.
"""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A strategy and its closed form."""

    strategy: Strategy  # complete but for device names on many devices
    value: float  # by the objective
    effort: float  # of making its plan, in small plans
    lack: float = 0.0  # bytes that it seems to lack

    def comes_near(self, limit: float) -> bool:
        return self.lack <= 0 and self.value <= limit


@dataclass(eq=False, slots=True)
class _Family:
    """Strategies that differ in their order and their micro-batches."""

    strategy: Strategy  # without these
    orders: Sequence[Order]
    counts: Sequence[int]
    values: Floats | None = None  # relaxed, ``[orders, counts]``; infinite for invalid ones and those already cut. None until first needed.


@dataclass(eq=False)
class FreeSpace:
    """The search space where nothing says how a model is divided."""

    forms: ClosedForms
    freedom: Freedom
    objective: Objective
    effort: float = math.inf  # how many small plans may be made
    set_in: Config | None = None  # the settings, where they say how many stages there are: what they mean without a search is in the space
    num_strategies: int = field(default=0, init=False)  # in the space, once some were ranked

    @property
    def takes_ungathered(self) -> bool:
        """Whether the settings rule out gathering rows anyway."""
        return (self.freedom.micro_batches or 1) > 1 or not self.freedom.config.communication.gather_rows

    @cached_property
    def space(self) -> Space:
        planner = self.forms.planner
        return Space(planner.cluster, self.freedom, planner.num_rows, planner.points.num_units, planner.pieces.can_split)

    def realize(self, strategy: Strategy) -> EstimatedPlan:
        if self.set_in is not None and strategy.is_open:
            return plan_as_set(
                StagePricing.of(self.forms.planner.prices, self.set_in.communication.overlap), self.set_in, self.forms.planner.cuts
            )
        return self.forms.planner.realize(self.forms.places.named(strategy))

    def known(self, start: Sequence[Strategy]) -> Iterator[Ranked]:
        """What settings mean without a search; and known good strategies that the devices suffice for, which need not be in the space."""
        if self.set_in is not None and self.freedom.using is None:
            yield Ranked(Strategy((ReplicaSpec(),), self.forms.planner.cluster.devices), 0.0, 1.0)
        counts, by_name = self.space.counts, self.forms.planner.cluster.by_name
        for each in start:
            if each.is_open or any(counts.get(kind, 0) < number for kind, number in each.taken.items()):
                continue
            if each.names and all(name in by_name for name in each.names):
                yield Ranked(each, 0.0, effort_of(each))
            if not each.is_unlike:  # the rules of places know groups of one type
                yield from (Ranked(replace(each.unnamed, near=near), 0.0, effort_of(each)) for near in (True, False))

    def plain(self, best: Strategy | None) -> Iterator[Ranked]:
        """Data parallelism without more: on all devices, on each type, each unlike host and each single device of a type."""
        order, policy = self.freedom.orders[0], self.freedom.policies[0]
        for strategy in self.space.data_parallel():
            number = min(self.space.micro_batches(self.space.num_rows // strategy.num_replicas), default=0)
            if number and not self._overflows(strategy, number):
                own = self._by_form(ordered(strategy, order, order, number, policy))
                if own.lack <= 0:
                    yield own

    def spread(self) -> Iterator[Ranked]:
        """Split groups over several hosts or device types that promise most.

        Each with few micro-batches, and with more where memory may be short: up to one more than with which activations surely fit, for
        what single ops need is not known.
        """
        order, policy = self.freedom.orders[0], self.freedom.policies[0]
        found = list[list[Ranked]]()
        for strategy in self.space.spread():
            own, is_last = list[Ranked](), False
            for number in self.space.micro_batches(self.space.num_rows // strategy.num_replicas):
                each = ordered(strategy, order, order, number, policy)
                if not self._overflows(each, number):
                    seconds = self.forms.spread_seconds(each, number)
                    own.append(Ranked(each, self.objective.likely(each, seconds, self.forms.least_held(each, number)), effort_of(each)))
                if is_last:
                    break
                is_last = self.forms.surely_holds(each, number)
            found += [own] if own else []
        for own in sorted(found, key=lambda each: each[0].value)[:SPREAD]:
            yield from own

    def ranked(self) -> Iterator[Ranked]:
        """All strategies, best first; those that seem not to fit come last, the least lacking first."""
        number, num_forms = count(), 0
        heap: list[tuple[float, float, int, _Family | Ranked]] = [(0.0, least, next(number), family) for least, family in self._families()]
        heapify(heap)
        while heap:
            _, value, _, first = heappop(heap)
            if isinstance(first, Ranked):
                yield first
                continue
            if value == math.inf or num_forms >= max(FEWEST_FORMS, FORMS * self.effort):
                continue
            if first.values is None:
                first.values = self._relaxed(first)
            else:
                num_forms += 1
                for own in self._cut(first):
                    heappush(heap, (own.lack, own.value, next(number), own))
            heappush(heap, (0.0, float(first.values.min()), next(number), first))

    def _families(self) -> Iterator[tuple[float, _Family]]:
        """Families with the lower bound of their value from computing alone."""
        for strategy in self.space.lineups(self.alone):
            orders, counts = self.space.turns(strategy)
            if not orders or not counts or self._overflows(strategy, counts[0]):
                continue
            if strategy.near is not False or self.freedom.near is False:
                self.num_strategies += len(orders) * len(counts) * len(self.freedom.policies)
            seconds, held = self.forms.least(strategy, counts[0])
            yield self.objective.likely(strategy, seconds, held), _Family(strategy, orders, counts)

    def _overflows(self, strategy: Strategy, num_micro_batch: int) -> bool:
        """Whether the parameters alone do not fit."""
        return any(self.forms.shortage(replica, num_micro_batch) for replica in strategy.replicas)

    def _relaxed(self, family: _Family) -> Floats:
        strategy = family.strategy
        seconds, held = self.forms.relaxed(strategy, family.orders, family.counts)
        return np.array(self.objective.likely(strategy, seconds, np.broadcast_to(held, seconds.shape)))  # a copy

    def alone(self, replica: ReplicaSpec, num_micro_batch: int) -> float:
        """Seconds of replicas of one kind for the rows that match their speed, if all devices of the cluster took some."""
        forms = self.forms
        rows = max(forms.num_rows * forms.speed(replica) / forms.planner.pieces.cluster_speed, num_micro_batch) / num_micro_batch
        rank = (replica.ranks or ())[0]
        whole = float(forms.totals(rank.kind, rank.width, np.array([rows]))[0]) / replica.num_ranks
        return (num_micro_batch + replica.num_ranks - 1) * whole

    def _cut(self, family: _Family) -> Iterator[Ranked]:
        """The most promising strategy of a family in closed form with its cuts, by each policy."""
        assert family.values is not None
        order, place = divmod(int(family.values.argmin()), len(family.counts))
        family.values[order, place] = math.inf
        for policy in self.freedom.policies:
            strategy = ordered(family.strategy, family.orders[order], self.freedom.orders[0], family.counts[place], policy)
            yield self._by_form(strategy)

    def _by_form(self, strategy: Strategy) -> Ranked:
        """A strategy by its closed form with its cuts."""
        form = self.forms.of(strategy)
        value = self.objective.likely(strategy, form.seconds, form.held)
        return Ranked(strategy, value, effort_of(strategy, self.forms.places.num_looks(strategy)), form.lack)


def effort_of(strategy: Strategy, num_looks: int | None = None) -> float:
    """How many small plans take as long to make as this strategy's.

    `num_looks`: replicas that are simulated, because they differ in their hosts; None for one of each specification.
    """
    replicas = strategy.unnamed.replicas
    stages = sum(replica.num_ranks * (replica.num_chunks or 1) for replica in replicas) * (num_looks or len(replicas)) / len(replicas)
    plan = _effort(strategy.num_devices, stages * strategy.num_micro_batch)
    return plan * (SPLIT if strategy.is_split else 1)


def effort_of_plan(plan: Plan) -> float:
    """How many small plans take as long to make as one like this, if its replicas all differ, as they do in what they keep under ZeRO."""
    return _effort(len(plan.devices), sum(len(each.stages) * each.pipeline.num_micro_batch for each in plan.replicas))


def _effort(num_devices: int, num_passes: float) -> float:
    return 1 + num_devices / PER_PLAN + num_passes / PER_PLAN


def gains_from(graph: ModelGraph, cluster: Cluster, config: Config) -> Callable[[Plan, Choice], bool]:
    """Whether more sharded state may make a better plan: less memory; or a step that is enough shorter if it recomputes nothing.

    Only up to stage 2, which costs little, and where plans like that take no more than the effort.
    """
    is_set = "recompute.policy" in config.explicit and config.recompute.policy != "auto"

    def gains(plan: Plan, level: Choice) -> bool:
        if config.planning.objective == "memory":
            return True
        if level == "3" or is_set or effort_of_plan(plan) > config.planning.effort or not _computes_again(plan):
            return False
        keeping = replace(plan, replicas=tuple(map(_keeping, plan.replicas)))
        costs = Costs.for_model(config, graph, cluster)
        return estimate(keeping, graph, cluster, costs).step_seconds < (1 - WORTH) * plan.step_seconds

    return gains


def _computes_again(plan: Plan) -> bool:
    stages = (stage for replica in plan.replicas for stage in replica.stages)
    return any(pipeline.recomputed_stages for pipeline in plan.pipelines) or any(
        segment.recompute for stage in stages for segment in stage.program
    )


def _keeping(replica: Replica) -> Replica:
    """The replica if it recomputed nothing."""

    def stage(own: Stage) -> Stage:
        return replace(own, program=tuple(replace(segment, recompute=False) for segment in own.program))

    return replace(replica, stages=tuple(map(stage, replica.stages)), pipeline=replace(replica.pipeline, recomputed_stages=()))


def ordered(strategy: Strategy, order: Order, plain: Order, num_micro_batch: int, policy: Recomputation) -> Strategy:
    """Sets order, micro-batches and policy; replicas of one rank get the plain order."""

    def with_order(replica: ReplicaSpec) -> ReplicaSpec:
        own = order if replica.num_ranks > 1 else plain
        return replace(
            replica,
            schedule=own.schedule,
            num_chunks=own.num_chunks,
            num_micro_batch=num_micro_batch,
            recompute=order.policy(policy),
        )

    return replace(strategy, replicas=tuple(map(with_order, strategy.replicas)))
