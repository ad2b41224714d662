"""The search: arrangements in the order of their bounds, the promising ones planned and estimated, until no other can be better.

space       line-ups of replicas over kinds of devices, orders, numbers of micro-batches
   | bounds      what no plan of an arrangement can beat; what surely does not fit falls out
   | naming      devices for the ranks, in every way that may differ
   | planning    cuts, rows, recomputation, split axes; the event simulation judges
Found
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from whale.config import Config
from whale.errors import ConfigError, PlanError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.seating import Seater, Seating
from whale.search.arrangement import Arrangement, Order
from whale.search.bounds import Bounds
from whale.search.found import Candidate, Found
from whale.search.freedom import Freedom, freedom_of
from whale.search.naming import Seats, namings
from whale.search.objective import Objective, objective_of
from whale.search.promise import Promise
from whale.search.space import Space
from whale.units import format_bytes

SPLIT_EFFORT = 8
"""A plan with split stages takes about so many times as long to make."""

DEVICES_PER_PLAN = 64
"""So many devices take about as long as all else that there is to making a small plan."""

TASKS_PER_PLAN = 64
"""So many tasks of the simulation likewise."""

EASE = 5e-4
"""What takes as much effort as a small plan is looked at as if it were slower by this share: many are about equally fast."""


def search(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    *,
    rows: int | None = None,
    effort: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> Found:
    """Finds the best plan of a model without scopes, where the configuration leaves a choice: by ``planning.objective``.

    What was set stays: micro-batches, order, stages, recomputation. Ctrl-C ends the search with the best plan so far, if there is one.

    Args:
        graph: the captured model.
        cluster: the devices there are; some may be left out.
        config: settings.
        rows: of the global batch; None for the example's.
        effort: how many plans to make at most, large ones counting for several; None for ``planning.effort``.
        tell: is called after each arrangement with what was seen so far, in words.

    Raises:
        PlanError: nothing fits; it says how much memory is missing where least is.
        ConfigError: what is set leaves no arrangement.
        ClusterError: what a sample costs is asked for, and a device has no price.
        WhaleError: the model can be divided in none of the ways.
    """
    num_rows = graph.num_rows if rows is None else rows
    seater = Seater(graph, cluster, config, num_rows)
    freedom = freedom_of(config, mixes_samples=seater.mixes_samples)
    seater = replace(seater, config=freedom.config)
    bounds = Bounds(seater.prices, seater.structure, num_rows)
    space = Space(cluster, freedom, num_rows, seater.points.num_units)
    objective = objective_of(config.planning.objective, cluster, bounds)
    run = _Run(freedom, cluster, seater, objective, config.planning.effort if effort is None else effort, tell)
    lineups = list(space.lineups(bounds))
    fitting = [lineup for lineup in lineups if not any(map(bounds.shortage, lineup))]
    candidates = [(bounds.of(each), each) for lineup in fitting for each in space.arrangements(lineup)]
    promise = Promise(seater.prices, seater.points, num_rows)
    plain = space.plainest(each for _, each in candidates)

    def turn(candidate: tuple[float, Arrangement]) -> tuple[bool, float, int]:
        bound, arrangement = candidate
        promised = objective.likely(arrangement, promise.of(arrangement, bound)) * (1 + EASE * _effort(arrangement))
        return arrangement != plain, promised, arrangement.num_devices

    run.look_at([(objective.at_least(each, seconds), each) for seconds, each in sorted(candidates, key=turn)])
    if run.best is None:
        raise run.failure(min((max(map(bounds.shortage, lineup)) for lineup in lineups), default=0))
    return run.found()


@dataclass(eq=False)
class _Run:
    """One search: what it has seen so far.

    Args:
        freedom: what may be chosen.
        cluster: the devices.
        seater: makes plans.
        objective: judges them.
        effort: that is left.
        tell: is told what was seen so far.

    Attributes:
        best: the best plan so far.
    """

    freedom: Freedom
    cluster: Cluster
    seater: Seater
    objective: Objective
    effort: float
    tell: Callable[[str], None] | None
    best: Candidate | None = field(default=None, init=False)
    _drafts: list[Candidate] = field(default_factory=list, init=False)
    _faults: list[WhaleError] = field(default_factory=list, init=False)
    _unproven: list[float] = field(default_factory=list, init=False)
    _num_arrangements: int = field(default=0, init=False)
    _num_planned: int = field(default=0, init=False)
    _was_interrupted: bool = field(default=False, init=False)

    def look_at(self, candidates: list[tuple[float, Arrangement]]) -> None:
        """Plans the candidates whose bound is below the best plan, as far as the effort goes."""
        self._num_arrangements = len(candidates)
        for bound, arrangement in candidates:
            if self.best is not None and bound >= self.best.value:
                continue
            if self.best is not None and (_effort(arrangement) > self.effort or self._was_interrupted):
                self._unproven.append(bound)
                continue
            try:
                self._plan(arrangement)
            except KeyboardInterrupt:
                if self.best is None:
                    raise
                self._was_interrupted = True
                self._unproven.append(bound)

    def _plan(self, arrangement: Arrangement) -> None:
        """Drafts an arrangement in all namings and keeps the best."""
        best: Candidate | None = None
        for seats in namings(arrangement, self.cluster, near=self.freedom.near):
            for policy in self.freedom.policies:
                self.effort -= _effort(arrangement)
                try:
                    draft = self.seater.draft(self._seatings(arrangement, seats), policy)
                except WhaleError as fault:
                    self._faults.append(fault)
                    continue
                self._num_planned += 1
                own = Candidate(arrangement, draft, self.objective)
                best = own if best is None or own.rank < best.rank else best
        if best is not None:
            self._drafts.append(best)
            self.best = best if self.best is None or best.rank < self.best.rank else self.best
        if self.tell is not None:
            so_far = "nothing fits so far" if self.best is None else f"the best so far: {self.best}"
            self.tell(f"{self._num_planned} plans of {self._num_arrangements} arrangements estimated, {so_far}")

    def _seatings(self, arrangement: Arrangement, seats: Seats) -> tuple[Seating, ...]:
        """A replica of one rank has the plain order."""

        def order(num_ranks: int) -> Order:
            return arrangement.order if num_ranks > 1 else self.freedom.orders[0]

        return tuple(
            Seating(order(len(placed)).schedule, order(len(placed)).num_chunks, arrangement.num_micro_batch, team.width, placed)
            for team, placed in seats
        )

    def found(self) -> Found:
        """The outcome, once there is a plan."""
        assert self.best is not None
        ranked = sorted(self._drafts, key=lambda each: each.rank)
        value = self.best.value
        plan, step = self.best.draft.finished()
        unproven = [bound for bound in self._unproven if bound < value]
        found = Found(
            plan=plan,
            step=step,
            arrangement=self.best.arrangement,
            objective=self.objective,
            bound=min((value, *unproven)),
            others=tuple(each for each in ranked if each is not self.best),
            num_arrangements=self._num_arrangements,
            num_planned=self._num_planned,
            num_unproven=len(unproven),
            was_interrupted=self._was_interrupted,
        )
        return replace(found, plan=replace(found.plan, choices=(_explain(found), *found.plan.choices)))

    def failure(self, missing: int) -> WhaleError:
        """Why there is no plan.

        Args:
            missing: bytes by which the parameters alone overflow the devices of any replica.
        """
        shortages = [fault for fault in self._faults if isinstance(fault, MemoryShortage)]
        if shortages:
            return min(shortages, key=lambda fault: fault.num_bytes)
        if self._faults:
            return self._faults[0]
        if missing:
            return PlanError(
                f"a plan fits in memory (weights, gradients and optimizer state alone are {format_bytes(missing)} more than "
                "the devices of any replica hold)",
                hint="more devices, or devices with more memory",
            )
        return ConfigError("the batch has a row for every device and micro-batch, and the model a place to cut for every stage")


def _effort(arrangement: Arrangement) -> float:
    """How many small plans take as long to make as one of this arrangement."""
    plan = 1 + arrangement.num_devices / DEVICES_PER_PLAN + arrangement.num_tasks / TASKS_PER_PLAN
    return plan * (SPLIT_EFFORT if arrangement.is_split else 1)


def _explain(found: Found) -> Choice:
    reasons = found.reasons[: -len(found.runners_up) or None]
    interrupted = f"{reasons[0]}; " if found.was_interrupted else ""
    return Choice(
        "search",
        "arrangement",
        str(found.arrangement),
        cost=f"{found.num_planned} plans of {found.num_arrangements} arrangements estimated",
        bound=f"{interrupted}{reasons[-1]}",
        runner_up="; ".join(map(str, found.runners_up)),
    )
