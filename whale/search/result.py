"""What a search finds, and what it has to say of it."""

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

NUM_RUNNERS_UP = 5
"""So many are told."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its plan.

    Attributes:
        strategy: what it is, whichever devices of a kind it has.
        estimated: its plan, without reasons: `EstimatedPlan.finished` has them.
        objective: that it is judged by.
    """

    strategy: Strategy
    estimated: EstimatedPlan
    objective: Objective

    @property
    def seconds(self) -> float:
        """Of a step, estimated."""
        return self.estimated.plan.step_seconds

    @cached_property
    def value(self) -> float:
        """What the objective says of it."""
        return self.objective.of(self.estimated.plan, self.estimated.step)

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better; of equal ones the faster."""
        return self.value, self.seconds

    def __str__(self) -> str:
        return f"{self.strategy}: {self.objective.text(self.value)}"


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        plan: the best.
        step: its estimate.
        best: what it is.
        others: the best plans of other strategies that were planned, best first.
        num_strategies: in the space.
        num_planned: plans that were made and estimated.
        was_interrupted: whether it was ended early by the user.
    """

    plan: Plan
    step: StepEstimate
    best: Candidate
    others: tuple[Candidate, ...]
    num_strategies: int
    num_planned: int
    was_interrupted: bool = False

    @property
    def strategy(self) -> Strategy:
        return self.best.strategy

    @property
    def objective(self) -> Objective:
        """That the plan is the best by."""
        return self.best.objective

    @property
    def value(self) -> float:
        """What the objective says of the plan."""
        return self.best.value

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """The first of the others."""
        return self.others[:NUM_RUNNERS_UP]

    @property
    def of_sample(self) -> float:
        """What compares it with plans for other batches."""
        return self.objective.of_sample(self.value, self.plan.planned_rows)

    def runner_up(self, number: int) -> tuple[Plan, StepEstimate]:
        """The plan of a runner-up with what led to it, verified, and the estimate of its step.

        Args:
            number: 1 for the first.

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
        """What the plan says of it."""
        so_far = f"the search was interrupted: the best of {counted(self.num_planned, 'plan')} so far"
        bound = so_far if self.was_interrupted else ""
        runner_up = "; ".join(map(str, self.runners_up))
        return Choice("search", "strategy", str(self.strategy), cost=self.effort, bound=bound, runner_up=runner_up)
