"""Questions to the search: what is planned for, or the same with one thing changed; and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale.config import Config
from whale.estimate import Costs, StepEstimate, estimate
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning.strategy import Strategy
from whale.search.deciding import ruled_plan, said_state, with_states, without_recomputation
from whale.search.objective import Objective
from whale.search.searching import Candidate, search


@dataclass(frozen=True)
class PlanQuestion:
    """What is planned for."""

    graph: ModelGraph
    cluster: Cluster
    config: Config
    rows: int  # of the global batch
    using: Device | None = None  # a device type that every plan must use; None for any

    @property
    def objective(self) -> Objective:
        return Objective(self.config.planning.objective, self.cluster, self.rows)

    def value_of(self, plan: Plan) -> float:
        """The value that a plan for other figures of the same devices has here."""
        costs = Costs.for_model(self.config, self.graph, self.cluster)
        return self.objective.of(plan, estimate(plan, self.graph, self.cluster, costs))


@dataclass(frozen=True)
class Answer:
    """A plan for a question."""

    setting: str  # what the question changes, in words; "" where nothing
    objective: Objective
    value: float  # of the plan, by the objective
    plan: Plan
    step: StepEstimate  # its estimate
    kinds: frozenset[Device]  # device types in use
    state: str  # ``memory.zero`` and ``memory.offload``
    strategy: Strategy | None  # without device names; None for a plan that no search has found
    is_apart: bool  # whether replicas use their own rows where an op needs all

    @property
    def arrangement(self) -> str:
        return "the plan without a search" if self.strategy is None else str(self.strategy)

    def __str__(self) -> str:
        return f"{self.arrangement}: {self.objective.text(self.value)}"


def answers(question: PlanQuestion, setting: str = "", start: Sequence[Strategy] = ()) -> tuple[Answer, ...]:
    """The plans that `whale.search.decide` would choose from, best first.

    Args:
        question: with its effort in ``planning.effort``.
        setting: what it changes, in words.
        start: strategies that are good for a similar question.

    Raises:
        WhaleError: as of `search`.
    """
    graph, cluster, objective = question.graph, question.cluster, question.objective
    found = list[Answer]()

    def take(plan: Plan, step: StepEstimate, config: Config, own: Candidate | None) -> None:
        kinds = frozenset(cluster.by_name[name].kind for name in plan.devices)
        strategy, is_apart = (None, False) if own is None else (own.strategy, bool(own.estimated.not_joined))
        value, state = objective.of(plan, step), said_state(plan, config)
        found.append(Answer(setting, objective, value, plan, step, kinds, state, strategy, is_apart))

    def under(config: Config) -> tuple[Plan, StepEstimate]:
        best = search(graph, cluster, config, rows=question.rows, start=start, using=question.using)
        take(best.plan, best.step, config, best.best)
        for each in best.others:
            take(each.estimated.plan, each.estimated.step, config, each)
        if (rule := ruled_plan(graph, cluster, config, question.rows)) is not None:
            take(*rule, config, None)
        return best.plan, best.step

    compares = objective.name == "step_time"
    least = without_recomputation(graph, cluster, question.config)
    plan, step = with_states(question.config, len(cluster.devices), under, may_compare=compares, least=least)
    told = (replace(each, plan=plan, state=said_state(plan, question.config)) if each.step is step else each for each in found)
    kept = (each for each in told if question.using in (None, *each.kinds))  # around scopes a plan need not take all that it may
    return tuple(sorted(kept, key=lambda each: each.value))
