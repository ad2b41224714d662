"""The result of a search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from whale.errors import ConfigError
from whale.estimate import StepEstimate
from whale.ir.plan import Choice, Plan
from whale.planning.plan import EstimatedPlan
from whale.planning.strategy import Strategy
from whale.search.objective import Objective
from whale.units import counted

NUM_RUNNERS_UP = 5  # listed in the plan's choice


@dataclass(frozen=True)
class Candidate:
    """A strategy (without device names) with its plan; `EstimatedPlan.finished` adds the reasons."""

    strategy: Strategy
    estimated: EstimatedPlan
    objective: Objective

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
        choice = Choice("search", f"runner-up {number}", str(own), bound=f"the best is {self.best}")
        return replace(plan, choices=(choice, *plan.choices)), step

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
