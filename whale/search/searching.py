"""The search: strategies ordered by a closed form; the first are planned and simulated, and the best is taken.

states      what is sharded and offloaded, where that is open: the next one where nothing fits, or where it may be better
space       replicas over device types, orders, numbers of micro-batches; one strategy where all is set
   | form       closed form of a step: of all strategies relaxed, of the first ones with their cuts
   | realize    cuts, rows, recomputation, split axes; the event simulation judges
SearchResult
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from whale.config import Config
from whale.errors import ConfigError, OutOfMemory, WhaleError
from whale.estimate import Costs, StepEstimate
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.plan import EstimatedPlan, StatedPlan
from whale.planning.realizing import Realizer
from whale.planning.replicas.joining import mixes_samples
from whale.planning.strategy import StateSpec, Strategy, strategy_of
from whale.progress import without_collecting
from whale.search.form import ClosedForms
from whale.search.freedom import States, describe_state, freedom_of, pin_of
from whale.search.objective import Objective, check_prices
from whale.search.open import AsSet, OpenSpace, is_divided
from whale.search.ranking import PER_PLAN, FreeSpace, Ranked, gains_from
from whale.units import counted

NUM_RUNNERS_UP = 5  # listed in the plan's choice

PATIENCE = 500
"""A plan that takes 1/500 of the effort left is made if its form is up to twice the best plan, a small one of the usual effort up to 1.2
times; others in proportion. In 100 random searches on 2 to 16 devices, memory short in a third of them, none that promises less
is faster; with 1000 for 500, 6 % fewer plans, two are slower by 1.3 and 3.3 %, and with 250, 2 % more plans, none is faster.
"""

RUNNERS_UP_SHARE = 20
"""Runners-up that cannot be better are planned only where they take at most this fraction of the effort. Halved or doubled: 4 searches make
as many plans.
"""

TRIES = 6
"""Plans beyond the effort while nothing fits. Halved or doubled: 20 searches of examples/benchmarks/constants.py in short memory, half of
them with the effort of one plan, are the same.
"""

REFUSED = 5
"""Plans that take as long as one that does not fit: it is made again with less memory. Counted while nothing fits: in the same 100 searches
15 % fewer plans than without, a quarter less time, and no plan is slower; nearly all searches find one within 6 plans, or none at all.
"""


NEARLY = 0.05
"""Share by which a strategy that the effort suffices for may promise less than the first, and be planned before it. On 1,024 devices of
three types the search takes 2.4 CPU seconds for a step of 4.68 s; with 0 14 seconds for one of 5.01 s.
"""


class StrategySpace(Protocol):
    """What a search ranges over with one state."""

    @property
    def num_strategies(self) -> int: ...

    @property
    def takes_ungathered(self) -> bool: ...

    def realize(self, strategy: Strategy) -> EstimatedPlan | StatedPlan:
        """The plan of a strategy, with its estimate."""

    def known(self, start: Sequence[Strategy]) -> Iterator[Ranked]:
        """Strategies that are planned first, whatever the effort; `start` is good on a similar cluster."""

    def ranked(self) -> Iterator[Ranked]:
        """All strategies, best first."""

    def plain(self, best: Strategy | None) -> Iterator[Ranked]:
        """What people try first: planned where it promises to be better than the best plan, whatever the effort."""

    def spread(self) -> Iterator[Ranked]:
        """Split groups that no host has, likewise."""


@dataclass(frozen=True)
class Candidate:
    """A strategy (without device names) with its plan; `EstimatedPlan.finished` adds the reasons."""

    strategy: Strategy
    estimated: EstimatedPlan | StatedPlan
    objective: Objective
    is_as_set: bool = False  # whether there was no other strategy

    @property
    def seconds(self) -> float:
        return self.estimated.plan.step_seconds

    @cached_property
    def value(self) -> float:
        return self.objective.of(self.estimated.plan, self.estimated.step)

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better; of equal values the faster."""
        return self.value, self.seconds

    def __str__(self) -> str:
        return f"{self.strategy}: {self.objective.text(self.value)}"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    plan: Plan  # the best
    step: StepEstimate  # its estimate
    best: Candidate  # its strategy
    others: tuple[Candidate, ...]  # the best plan of each other strategy that was planned, best first
    num_strategies: int  # in the space
    num_planned: int  # plans that were made and estimated
    was_interrupted: bool = False  # whether the user ended it early

    @property
    def strategy(self) -> Strategy:
        return self.best.strategy

    @property
    def objective(self) -> Objective:
        return self.best.objective

    @property
    def value(self) -> float:
        return self.best.value

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        return self.others[:NUM_RUNNERS_UP]

    @property
    def of_sample(self) -> float:
        """Comparable with plans for other batch sizes."""
        return self.objective.of_sample(self.value, self.plan.planned_rows)

    def runner_up(self, number: int) -> tuple[Plan, StepEstimate]:
        """The plan of a runner-up (1 for the first) with its reasons, verified, and its estimate.

        Raises:
            ConfigError: there are not so many.
        """
        if not 1 <= number <= len(self.others):
            raise ConfigError(f"there is no runner-up {number}; the search has {len(self.others)}")
        own = self.others[number - 1]
        plan, step = own.estimated.finished()
        choices = [Choice("search", f"runner-up {number}", str(own), bound=f"the best is {self.best}")]
        if own.strategy.state is not None:
            choices.append(Choice("memory", "state", describe_state(own.strategy.state, plan)))
        return replace(plan, choices=(*choices, *plan.choices)), step

    def __str__(self) -> str:
        return str(self.best)

    @property
    def effort(self) -> str:
        """What was looked at, in words."""
        return f"{counted(self.num_planned, 'plan')} of {counted(self.num_strategies, 'strategy')} simulated"

    @property
    def choice(self) -> Choice:
        """What the plan says of the search."""
        so_far = f"the search was interrupted: the best of {counted(self.num_planned, 'plan')} so far"
        bound = so_far if self.was_interrupted else ""
        runner_up = "; ".join(map(str, self.runners_up))
        return Choice("search", "strategy", str(self.strategy), cost=self.effort, bound=bound, runner_up=runner_up)


@without_collecting()
def search(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    *,
    rows: int | None = None,
    effort: float | None = None,
    start: Sequence[Strategy] = (),
    using: Device | None = None,
    tries: int = TRIES,
    is_brief: bool = False,
    tell: Callable[[str], None] | None = None,
) -> SearchResult:
    """Finds the best plan by ``planning.objective``, where scopes and the configuration leave a choice.

    What was set stays: scopes, written replicas, micro-batches, order, stages, recomputation, state. Ctrl-C ends the search with
    the best plan so far, if there is one.

    Args:
        graph: the captured model.
        cluster: the devices; some may be left out.
        config: settings.
        rows: of the global batch; None for the example's.
        effort: how many plans to make at most, large ones counting for several; None for ``planning.effort``.
        start: strategies that are good on a similar cluster, planned first whatever the effort, where scopes leave
            strategies to the search.
        using: a device type that every plan must have; None for any.
        tries: plans beyond the effort while nothing fits.
        is_brief: whether to end at the plan that settings mean without a search, where it fits.
        tell: is called after each plan with the progress in words.

    Raises:
        PlanError: nothing fits; with the missing memory, and how much more, or how many devices, would suffice.
        ConfigError: the settings leave no strategy.
        AnnotationError: scopes that cannot be honoured.
        ClusterError: the objective is cost, and a device has no price.
        WhaleError: the model cannot be divided in any way.
    """
    if config.planning.objective == "cost":
        check_prices(cluster)
    num_rows = graph.num_rows if rows is None else rows
    objective, most = Objective(config.planning.objective, cluster, num_rows), config.planning.effort if effort is None else effort
    states = States.of(config, len(cluster.devices))
    run = Run(objective, states, tell, tries)
    is_pinned = pin_of(config) is not None
    with run.kept():
        for state, share in states.in_turn(run.plan_at, gains_from(graph, cluster, config)):
            own, left = state.set_in(config), max(1.0, share * most)
            if is_brief or is_pinned:
                as_set = AsSet(graph, cluster, own, rows)
                run.look_in(as_set, state, left)
                if run.has_plan(state) or is_pinned or not run.is_short:
                    run.raise_other(as_set, None)
                    continue
            space, free = _spaces(graph, cluster, own, num_rows, objective, left, using)
            run.look_in(space, state, left, start)
            run.raise_other(space, free)
        run.conclude()
    return run.result()


def _spaces(
    graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int, objective: Objective, effort: float, using: Device | None
) -> tuple[FreeSpace | OpenSpace, FreeSpace]:
    """The space to search with these settings, and the space if nothing divided the model."""
    prices = Prices(graph, cluster, Costs.for_model(config, graph, cluster))
    freedom = replace(freedom_of(config, mixes_samples=mixes_samples(prices)), using=using)
    forms, divided = ClosedForms(Realizer(prices, freedom.config, num_rows)), is_divided(graph, config)
    has_rule = config.pipeline.num_stages is not None and not divided
    free = FreeSpace(forms, freedom, objective, effort, config if has_rule else None)
    return OpenSpace(forms, freedom, objective, config) if divided else free, free


def affordable_first(ranked: Iterable[Ranked], effort: float) -> Iterator[Ranked]:
    """Strategies in their order; where the first takes more than the effort, after one that does not and promises nearly as much."""
    waiting, others = list[Ranked](), iter(ranked)
    for each in others:
        is_near = not waiting or each.comes_near((1 + NEARLY) * waiting[0].value)
        if is_near and each.effort <= effort:
            yield each
            break
        waiting.append(each)
        if not is_near:
            break
    yield from waiting
    yield from others


@dataclass(eq=False)
class Run:
    """One search in progress.

    Plans that do not gather rows which an op needs together are kept in `ungathered` and taken only where no other is found, unless the
    settings rule out gathering anyway (`takes_ungathered`).
    """

    objective: Objective
    states: States
    tell: Callable[[str], None] | None
    tries: int = TRIES
    space: StrategySpace = field(init=False)  # that is looked in
    state: StateSpec = field(init=False)  # of its plans
    effort: float = field(default=0.0, init=False)  # what is left of it
    best: Candidate | None = field(default=None, init=False)  # the best plan so far
    candidates: dict[Strategy, Candidate] = field(default_factory=dict, init=False)  # the best plan of each strategy
    ungathered: dict[Strategy, Candidate] = field(default_factory=dict, init=False)
    fault: WhaleError | None = field(default=None, init=False)  # of the last state without a plan
    num_planned: int = field(default=0, init=False)  # plans that were made and estimated
    num_strategies: int = field(default=0, init=False)  # in the spaces
    was_interrupted: bool = field(default=False, init=False)
    _faults: list[WhaleError] = field(default_factory=list, init=False)  # of strategies without a plan, in this state
    _short: list[tuple[Strategy, MemoryShortage]] = field(default_factory=list, init=False)  # strategies whose plans do not fit
    _num_tries: int = field(default=0, init=False)
    _refused: float = field(default=0.0, init=False)  # effort that refused plans took beyond that of others, while nothing fits
    _seen: set[Strategy] = field(default_factory=set, init=False)
    # the best plan with each state that was looked at, but for `ungathered`
    _of_states: dict[StateSpec, Candidate | None] = field(default_factory=dict, init=False)

    def look_in(self, space: StrategySpace, state: StateSpec, effort: float, start: Sequence[Strategy] = ()) -> None:
        """Plans the strategies of a space that promise most, with so much effort."""
        self.space, self.state, self.effort, self._num_tries, self._refused = space, state, effort, 0, 0.0
        self._of_states.setdefault(state, None)
        for known in (self._faults, self._short, self._seen):
            known.clear()
        self.look_at(space.known(start), is_must=True)
        self.look_at(affordable_first(space.ranked(), effort))
        self.look_at(space.plain(None if self.best is None else self.best.strategy), is_must=True)
        self.look_at(space.spread(), is_must=True)
        self.num_strategies += space.num_strategies

    def plan_at(self, offload: str) -> Plan | None:
        """The best plan so far that keeps this on hosts, and gathers the rows that an op needs together."""
        found = [each for state, each in self._of_states.items() if each is not None and state.offload == offload]
        return min(found, key=lambda each: each.rank).estimated.plan if found else None

    def has_plan(self, state: StateSpec) -> bool:
        return self._of_states[state] is not None

    @property
    def is_short(self) -> bool:
        """Whether plans of this state did not fit."""
        return bool(self._short)

    def raise_other(self, space: FreeSpace | OpenSpace | AsSet, free: FreeSpace | None) -> None:
        """Raises why there is no plan in this state, unless that is lack of memory, or it is only compared with others; `fault` keeps it.

        `free`: the space if nothing divided the model.
        """
        if self.best is not None or self.ungathered:
            return
        from whale.search.failure import failure, is_lack_of_memory  # needed here alone

        if isinstance(space, AsSet) or free is None:
            self.fault = self._faults[0]
        elif self.state != self.states.last and is_lack_of_memory(self._faults, self._short, space, free):
            return
        else:
            self.fault = failure(self._faults, self._short, space, free)
        if not isinstance(self.fault, OutOfMemory):
            raise self.fault

    def look_at(self, ranked: Iterable[Ranked], *, is_must: bool = False) -> None:
        """Plans strategies in order, while effort is left and they promise to beat the best plan.

        `is_must`: whether to plan all that promise to be better than the best plan, whatever the effort.
        """
        for each in ranked:
            if each.strategy in self._seen or (is_must and self.best is not None and each.value >= self.best.value):
                continue
            verdict = is_must or self._is_worth(each)
            if verdict is None:
                return
            self.effort -= each.effort if verdict else 1.0
            if verdict:
                if not self._plan(each.strategy) and self.best is None:
                    self._refused += (REFUSED - 1) * each.effort
                self._tell()

    def _is_worth(self, each: Ranked) -> bool | None:
        """Whether to plan a strategy; None where nothing that follows is worth it.

        The very first is always planned. The larger the share of the effort left, the more a strategy must promise; a few that
        promise less are planned as runners-up.
        """
        if not self.num_planned and not self._faults:
            return True
        if self.best is None:
            self._num_tries += each.effort > self.effort - self._refused
            return True if self._num_tries <= self.tries else None
        least = 1 + each.strategy.num_devices / PER_PLAN
        spare = self.effort / RUNNERS_UP_SHARE if len(self.candidates) <= NUM_RUNNERS_UP else 0.0
        if each.effort <= max(spare, self.effort * each.comes_near(self._reach(each.effort))):
            return True
        return False if least <= max(spare, self.effort * each.comes_near(self._reach(least))) else None

    def _reach(self, needed: float) -> float:
        """The value up to which a strategy of this effort is planned."""
        assert self.best is not None
        return self.best.value * (1 + self.effort / needed / PATIENCE)

    def _plan(self, strategy: Strategy) -> bool:
        """Makes and keeps the plan of a strategy; whether memory suffices for it."""
        self._seen.add(strategy)
        is_rule = strategy.is_open and isinstance(self.space, FreeSpace)  # what settings mean without a search: they may leave more
        try:
            estimated = self.space.realize(strategy)
        except WhaleError as fault:
            if is_rule:
                return True
            self._faults.append(fault)
            if isinstance(fault, MemoryShortage):
                self._short.append((strategy, fault))
            return not isinstance(fault, MemoryShortage)
        self.num_planned += 1
        if is_rule:
            strategy = strategy_of(estimated.plan, self.objective.cluster) or strategy
        named = replace(strategy.unnamed, state=self.state if self.states.are_open else None)
        own = Candidate(named, estimated, self.objective, isinstance(self.space, AsSet))
        is_ungathered = bool(estimated.not_joined) and not self.space.takes_ungathered
        found = self.ungathered if is_ungathered else self.candidates
        found[own.strategy] = min(own, found.get(own.strategy, own), key=lambda each: each.rank)
        if not is_ungathered:
            self._of_states[self.state] = min(own, self._of_states[self.state] or own, key=lambda each: each.rank)
            self.best = own if self.best is None else min(self.best, own, key=lambda each: each.rank)
        return True

    def conclude(self) -> None:
        """Falls back to plans that do not gather rows; the plan says so."""
        if self.best is None and self.ungathered:
            self.candidates |= self.ungathered
            self.best = min(self.ungathered.values(), key=lambda each: each.rank)

    def _tell(self) -> None:
        if self.tell is not None:
            so_far = "nothing fits so far" if self.best is None else f"the best so far: {self.best}"
            self.tell(f"{counted(self.num_planned, 'plan')} estimated, {so_far}")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Ctrl-C inside ends the search with the best plan so far; it is raised where there is none."""
        try:
            yield
        except KeyboardInterrupt:
            self.conclude()
            if self.best is None:
                raise
            self.was_interrupted = True

    def result(self) -> SearchResult:
        """The result: Ctrl-C restarts its last part, a second one ends all.

        Raises:
            WhaleError: there is no plan; of the last state.
        """
        best = self.best
        if best is None:
            assert self.fault is not None, "the last state says why it has no plan"
            raise self.fault
        others = sorted((each for each in self.candidates.values() if each.strategy != best.strategy), key=lambda each: each.rank)
        try:
            plan, step = best.estimated.finished()
        except KeyboardInterrupt:
            self.was_interrupted = True
            plan, step = best.estimated.finished()
        found = SearchResult(plan, step, best, tuple(others), self.num_strategies, self.num_planned, self.was_interrupted)
        searched = () if best.is_as_set else (found.choice,)
        return replace(found, plan=replace(plan, choices=(*self._state_choices(best), *searched, *plan.choices)))

    def _state_choices(self, best: Candidate) -> Iterator[Choice]:
        """Why more is sharded or offloaded than settings ask for."""
        state = best.strategy.state
        if state in (None, self.states.first):
            return
        assert state is not None
        looked = list(self._of_states)
        others = (each for each in self.candidates.values() if each.strategy.state in looked[: looked.index(state)])
        other = min(others, key=lambda each: each.rank, default=None)
        bound = "nothing fits otherwise" if other is None else f"{self.objective.text(other.value)} with {other.strategy.state}"
        yield Choice("memory", "state", describe_state(state, best.estimated.plan), bound=bound)
