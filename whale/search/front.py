"""The line-ups of a space, each opened into its arrangements where its bound asks for it: those that promise most come first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.search.arrangement import Arrangement, Order
from whale.search.bounds.bounds import Bounds
from whale.search.objective import Objective
from whale.search.run import Look, effort_of
from whale.search.sketch.sketch import Sketches
from whale.search.space.space import Lineup, Space

EASE = 5e-4
"""What takes as much effort as a small plan is looked at as if it were slower by this share: many are about equally fast."""

SLACK = 1.1
"""Line-ups whose bound is above the best sketch by so much stay closed until a plan says how good it is."""

FAR = 1.5
"""A line-up that in its first order comes to so many times the best sketch is not sketched in others: these are taken to be as good."""


@dataclass(eq=False)
class Front:
    """What there is to be looked at.

    Args:
        space: of arrangements.
        bounds: below them.
        sketches: of them.
        objective: judges.

    Attributes:
        num_arrangements: in all line-ups that may fit.
    """

    space: Space
    bounds: Bounds
    sketches: Sketches
    objective: Objective
    num_arrangements: int = field(default=0, init=False)

    @cached_property
    def lineups(self) -> tuple[Lineup, ...]:
        """All line-ups."""
        return tuple(self.space.lineups(self.bounds))

    def promising(self) -> list[Look]:
        """The arrangements of the line-ups that may hold the best plan, as far as sketches tell; those that promise most first.

        Copies of the model come second at the latest: the plan without a search is always looked at, where it can be better.
        """
        found = list(self._plain())
        best = min((look.likely for look in found), default=math.inf)
        while self._closed and self._closed[-1][0] < SLACK * best:
            opened = list(self._opened(*self._closed.pop(), FAR * best))
            best = min(best, min(look.likely for look in opened))
            found += opened
        found = self._in_turn(found)
        return sorted(found, key=lambda look: (look is not found[0], not look.is_must))

    def closed(self, value: float) -> list[float]:
        """The bounds below a value of the arrangements whose line-ups are closed: those of the line-ups."""
        return [bound for bound, lineup in self._closed if bound < value for _ in self.space.arrangements(lineup)]

    def below(self, value: float) -> list[Look]:
        """The arrangements of the other line-ups whose bound is below a value."""
        found, left = list[Look](), list(self._closed)
        while left and left[-1][0] < value:
            found += self._opened(*left.pop(), FAR * value)
        del self._closed[len(left) :]  # at once: what interrupts it leaves them closed
        return self._in_turn(found)

    def _plain(self) -> Iterator[Look]:
        """Copies of the model on as many devices as can be."""
        plain = [each for each in self._closed if all(team.num_ranks * team.width == 1 for team in each[1])]
        if plain:
            most = max(plain, key=lambda each: sum(team.count for team in each[1]))
            self._closed.remove(most)
            for number, look in enumerate(self._opened(*most, math.inf)):
                look.is_must = number == 0
                yield look

    @cached_property
    def _closed(self) -> list[tuple[float, Lineup]]:
        """Line-ups that may fit, with bounds; the least last."""
        found = list[tuple[float, Lineup]]()
        for lineup in self.lineups:
            own = () if any(map(self.bounds.shortage, lineup)) else tuple(self.space.arrangements(lineup))
            if own:
                self.num_arrangements += len(own)
                seconds = self.bounds.of_lineup(lineup, own[0].num_micro_batch)
                found.append((self.objective.at_least(own[0], seconds), lineup))
        return sorted(found, key=lambda each: -each[0])

    def _opened(self, bound: float, lineup: Lineup, far: float) -> Iterator[Look]:
        """Its arrangements; `far` is from where on no more than the first sketches are made."""
        by_order: dict[Order, list[Arrangement]] = {}
        for arrangement in self.space.arrangements(lineup):
            by_order.setdefault(arrangement.order, []).append(arrangement)
        first = math.inf
        for near in self.space.rules(lineup):
            for own in by_order.values():
                sketched = [first] * len(own) if far <= first < math.inf else self._sketched(own, near)
                first = min(first, *sketched)
                for arrangement, likely in zip(own, sketched, strict=True):
                    yield Look(arrangement, near, bound, self.bound, self._fits, likely)

    def bound(self, arrangement: Arrangement) -> float:
        """What none of its plans is below: alike replicas have the mean of the rows, and the slowest stage of some cut."""
        seconds = self.bounds.of(arrangement)
        if len(arrangement.teams) == 1:
            rows = self.bounds.num_rows / arrangement.num_replicas
            seconds = max(seconds, self.sketches.least(arrangement.teams[0], arrangement.order, arrangement.num_micro_batch, rows))
        return self.objective.at_least(arrangement, seconds)

    def _fits(self, arrangement: Arrangement, share: float) -> bool:
        """Whether it would fit in this share of the memory, with equal rows for all replicas."""
        rows = self.bounds.num_rows / arrangement.num_replicas
        order, m = arrangement.order, arrangement.num_micro_batch
        return all(self.sketches.fits(team, rows, share, m, order) for team in arrangement.teams)

    def _sketched(self, own: Sequence[Arrangement], near: bool | None) -> list[float]:
        """What arrangements that differ in their micro-batches come to: sketched towards the best of them, the others by their nearest."""
        known: dict[int, float] = {}

        def at(index: int) -> float:
            if index not in known:
                known[index] = self._likely(own[index], near) if 0 <= index < len(own) else math.inf
            return known[index]

        place = len(own) // 2
        while at(place) == math.inf and place + 1 < len(own):
            place += 1  # smaller ones take less memory
        while (beside := min((place - 1, place + 1), key=at)) in range(len(own)) and at(beside) < at(place):
            place = beside
        seen = [index for index in known if index in range(len(own))]
        nearest = [min(seen, key=lambda other: abs(other - index)) for index in range(len(own))]
        return [known[other] * (1 + abs(other - index)) for index, other in enumerate(nearest)]

    def _likely(self, arrangement: Arrangement, near: bool | None) -> float:
        rules = (True, False) if near is None else (near,)
        return self.objective.likely(arrangement, min(self.sketches.seconds(arrangement, near=rule) for rule in rules))

    def _in_turn(self, looks: list[Look]) -> list[Look]:
        """Those that promise most first."""

        def turn(look: Look) -> tuple[float, float, int]:
            ease = 1 + EASE * effort_of(look.arrangement)
            return look.likely * ease, look.bound * ease, look.arrangement.num_devices

        return sorted(looks, key=turn)
