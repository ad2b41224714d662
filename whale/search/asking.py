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
from whale.search.freedom import States, describe_state
from whale.search.objective import Objective
from whale.search.searching import search


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
    strategy: Strategy  # without device names and state
    is_apart: bool  # whether replicas use their own rows where an op needs all

    def __str__(self) -> str:
        return f"{self.strategy}: {self.objective.text(self.value)}"


def answers(question: PlanQuestion, setting: str = "", start: Sequence[Strategy] = ()) -> tuple[Answer, ...]:
    """The plans that `whale.search.decide` would choose from, best first.

    Args:
        question: with its effort in ``planning.effort``.
        setting: what it changes, in words.
        start: strategies that are good for a similar question.

    Raises:
        WhaleError: as of `search`.
    """
    cluster, objective = question.cluster, question.objective
    best = search(question.graph, cluster, question.config, rows=question.rows, start=start, using=question.using)
    asked = States.of(question.config, len(cluster.devices)).first
    found = list[Answer]()
    for each in (best.best, *best.others):
        plan, step = (best.plan, best.step) if each is best.best else (each.estimated.plan, each.estimated.step)
        kinds = frozenset(cluster.by_name[name].kind for name in plan.devices)
        if question.using in (None, *kinds):  # around scopes a plan need not take all that it may
            state = str(asked) if each.strategy.state is None else describe_state(each.strategy.state, plan)
            strategy, is_apart = replace(each.strategy, state=None), bool(each.estimated.not_joined)
            found.append(Answer(setting, objective, each.value, plan, step, kinds, state, strategy, is_apart))
    return tuple(sorted(found, key=lambda each: each.value))
