"""What a search has seen so far: plans, the best of them, why others are none, and whether the user has ended it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from whale.errors import WhaleError
from whale.planning.plan import Draft
from whale.search.arrangement import Arrangement
from whale.search.found import Candidate
from whale.search.objective import Objective
from whale.search.space.ways import Way
from whale.units import counted

T = TypeVar("T")

PATIENCE = 500
"""A plan of which so many would be the effort that is left is made if its sketch is up to twice the best plan, others likewise."""


@dataclass(eq=False, kw_only=True)
class Progress:
    """One search under way.

    Args:
        objective: judges plans.
        effort: that is left.
        num_arrangements: in the space.
        tell: is told what was seen so far.

    Attributes:
        best: the best plan so far.
        drafts: the best plan of each arrangement.
        apart: likewise of plans that keep samples apart which the model mixes: they are taken only where no other is found.
        takes_apart: whether what is set keeps them apart in any case, so that these are plans like others.
        faults: why others have none.
        num_planned: plans that were made and estimated.
        was_interrupted: whether the user ended it.
    """

    objective: Objective
    effort: float
    num_arrangements: int
    tell: Callable[[str], None] | None
    best: Candidate | None = field(default=None, init=False)
    drafts: dict[Arrangement | Way, Candidate] = field(default_factory=dict, init=False)
    apart: dict[Arrangement | Way, Candidate] = field(default_factory=dict, init=False)
    takes_apart: bool = field(default=False, init=False)
    faults: list[WhaleError] = field(default_factory=list, init=False)
    num_planned: int = field(default=0, init=False)
    was_interrupted: bool = field(default=False, init=False)

    def add(self, arrangement: Arrangement | Way, draft: Draft) -> Candidate:
        """Keeps a plan if it is the best of its arrangement."""
        self.num_planned += 1
        own = Candidate(arrangement, draft, self.objective)
        if draft.reasons and not self.takes_apart:
            self._keep(self.apart, own)
            return own
        self._keep(self.drafts, own)
        self.best = own if self.best is None or own.rank < self.best.rank else self.best
        return own

    @staticmethod
    def _keep(found: dict[Arrangement | Way, Candidate], own: Candidate) -> None:
        known = found.setdefault(own.arrangement, own)
        found[own.arrangement] = own if own.rank < known.rank else known

    def value(self) -> float:
        """Of the best plan so far; infinite where there is none."""
        return math.inf if self.best is None else self.best.value

    def reach(self, effort: float = 1.0) -> float:
        """What takes so much effort and seems to come to more than this is not planned."""
        return math.inf if self.num_arrangements * effort <= self.effort else self.value() * (1 + self.effort / effort / PATIENCE)

    def settle(self) -> None:
        """Takes plans that keep samples apart, where there is no other: the plan says so."""
        if self.best is None and self.apart:
            self.drafts |= self.apart
            self.best = min(self.apart.values(), key=lambda each: each.rank)

    def tell_all(self) -> None:
        """Tells what was seen so far."""
        if self.tell is not None:
            so_far = "nothing fits so far" if self.best is None else f"the best so far: {self.best}"
            self.tell(f"{counted(self.num_planned, 'plan')} of {counted(self.num_arrangements, 'arrangement')} estimated, {so_far}")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Ctrl-C inside ends the search, with the best plan so far; where there is none, all."""
        try:
            yield
        except KeyboardInterrupt:
            self.settle()
            if self.best is None:
                raise
            self.was_interrupted = True

    def done(self, last: Callable[[], T]) -> T:
        """Does what has to be done whatever happens: Ctrl-C makes it begin anew, a second one ends all."""
        try:
            return last()
        except KeyboardInterrupt:
            self.was_interrupted = True
            return last()
