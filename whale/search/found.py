"""What a search finds, and what it has to say of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from whale.errors import ConfigError
from whale.estimate import StepEstimate
from whale.ir.plan import Choice, Plan
from whale.planning.plan import Draft
from whale.search.arrangement import Arrangement
from whale.search.objective import Objective
from whale.search.space.ways import Way
from whale.units import counted

NUM_RUNNERS_UP = 5
"""So many are told."""

SMALLEST_FIRST = "it fits only as what takes least memory was looked at first, with nothing, all blocks or everything computed again"


@dataclass(frozen=True)
class Candidate:
    """An arrangement on its devices.

    Attributes:
        arrangement: what it is.
        draft: its plan, without reasons: `Draft.finished` has them.
        objective: that it is judged by.
    """

    arrangement: Arrangement | Way
    draft: Draft
    objective: Objective

    @property
    def seconds(self) -> float:
        """Of a step, estimated."""
        return self.draft.plan.step_seconds

    @cached_property
    def value(self) -> float:
        """What the objective says of it."""
        return self.objective.of(self.draft.plan, self.draft.step)

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better; of equal ones the faster."""
        return self.value, self.seconds

    def __str__(self) -> str:
        return f"{self.arrangement}: {self.objective.text(self.value)}"


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        plan: the best.
        step: its estimate.
        arrangement: what it is, in short.
        objective: that it is the best by.
        others: of the other arrangements that were planned, best first.
        num_arrangements: in the space.
        num_planned: plans that were made and estimated.
        was_interrupted: whether it was ended early by the user.
        is_smallest_first: whether nothing seemed to fit, until what takes least memory was looked at first.
    """

    plan: Plan
    step: StepEstimate
    arrangement: Arrangement | Way
    objective: Objective
    others: tuple[Candidate, ...]
    num_arrangements: int
    num_planned: int
    was_interrupted: bool = False
    is_smallest_first: bool = False

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """The first of the others."""
        return self.others[:NUM_RUNNERS_UP]

    @cached_property
    def value(self) -> float:
        """What the objective says of the plan."""
        return self.objective.of(self.plan, self.step)

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
            raise ConfigError(f"a runner-up is one that the search has (runners-up: {len(self.others)}, asked for: {number})")
        own = self.others[number - 1]
        plan, step = own.draft.finished()
        said = Choice("search", f"runner-up {number}", str(own), bound=f"the best is {self.arrangement}: {self.objective.text(self.value)}")
        return replace(plan, choices=(said, *plan.choices)), step

    def __str__(self) -> str:
        return f"{self.arrangement}: {self.objective.text(self.value)}"

    @property
    def effort(self) -> str:
        """What was looked at, in words."""
        return f"{counted(self.num_planned, 'plan')} of {counted(self.num_arrangements, 'arrangement')} simulated"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is particular about this search, in words."""
        found = []
        if self.was_interrupted:
            found.append(f"the search was interrupted: the best of {counted(self.num_planned, 'plan')} so far")
        if self.is_smallest_first:
            found.append(SMALLEST_FIRST)
        return tuple(found)
