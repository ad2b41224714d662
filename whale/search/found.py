"""What a search finds, and what it has to say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whale.estimate import StepEstimate
from whale.ir.plan import Plan
from whale.planning.plan import Draft
from whale.search.arrangement import Arrangement
from whale.units import format_seconds


@dataclass(frozen=True)
class Candidate:
    """An arrangement on its devices.

    Attributes:
        arrangement: what it is.
        draft: its plan, without reasons: `Draft.finished` has them.
    """

    arrangement: Arrangement
    draft: Draft

    @property
    def seconds(self) -> float:
        """Of a step, estimated."""
        return self.draft.plan.step_seconds

    def __str__(self) -> str:
        return f"{self.arrangement}: {format_seconds(self.seconds)}"


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        plan: the fastest.
        step: its estimate.
        arrangement: what it is, in short.
        bound: seconds that no plan of the space is below.
        runners_up: the next fastest of other arrangements, fastest first.
        num_arrangements: in the space.
        num_planned: plans that were made and estimated.
        num_unproven: arrangements that might hold a faster plan by their bound, but were not planned.
        was_interrupted: whether it was ended early by the user.
    """

    plan: Plan
    step: StepEstimate
    arrangement: Arrangement
    bound: float
    runners_up: tuple[Candidate, ...]
    num_arrangements: int
    num_planned: int
    num_unproven: int
    was_interrupted: bool = False

    @property
    def gap(self) -> float:
        """By how much the plan can be above the best of the space: 0.018 for 1.8 %."""
        return self.plan.step_seconds / self.bound - 1 if self.bound > 0 else 0.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """How good the plan is, and what came next, in words."""
        return tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        if self.was_interrupted:
            yield f"the search was interrupted: the best of {self.num_planned} plans so far"
        yield f"chosen among {self.num_arrangements} arrangements, {self.num_planned} plans estimated: {self.arrangement}"
        if self.num_unproven:
            yield (
                f"within {self.gap:.1%} of the lower bound of this space, {format_seconds(self.bound)} "
                f"({self.num_unproven} arrangements might be faster by their bounds; planning.effort looks at more)"
            )
        else:
            yield "no arrangement of this space is faster"
        for runner_up in self.runners_up:
            slower = runner_up.seconds / self.plan.step_seconds - 1
            yield f"next: {runner_up} ({slower:+.1%})"
