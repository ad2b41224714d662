"""The least sum of tables within a room, exactly: of some values the cost is least whose weight, another sum, leaves it no larger.

A rate of cost per weight makes one sum of the two, whose least tells how much any values within the room cost at least; the rate for which
that is most is found between the cheapest values and the lightest ones. What may still be cheaper than the best within the room differs
little from the least by that rate: it is looked through, from the variable that goes last to the one that goes first, by what each value
adds to the least cost, to the least weight, and to the least sum of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import itemgetter

import numpy as np

from whale.estimate.costs.op_table import Floats
from whale.planning.shard.elimination import Order

CLOSE = 1e-9
"""Costs that differ by this share are equal."""

NOISE = 1e-12
"""Weights that differ by this share are equal."""

FEW = 32
"""Parts of values that are kept where not all are looked at."""

MAX_LOOKS = 50_000
"""So many values of variables are looked at."""

MAX_RATES = 40
"""So many rates are tried; a handful as a rule."""


class TooMany(Exception):
    """More would have to be looked at."""


@dataclass(frozen=True)
class Found:
    """Values of the variables.

    Attributes:
        cost: of them, as it is judged.
        values: of the variables.
    """

    cost: float
    values: tuple[int, ...]


Trail = tuple[int, "Trail"] | None
"""Values of variables, the last that was given one first."""


Part = tuple[float, float, float, Trail]
"""Values of the variables that go last, behind what all comes to at least with them: cost, weight, sum of both; a bare tuple, for speed."""


@dataclass(eq=False)
class Within:
    """The question.

    Args:
        order: in which the variables go.
        cost, weight: per table of the order, its values; infinite in both where they do not go together.
        room: for the weight.
        judge: tells what values really cost, which is no less than the sum; None where they are not allowed.
        most: what costs as much is not looked for.
    """

    order: Order
    cost: Sequence[Floats]
    weight: Sequence[Floats]
    room: float
    judge: Callable[[tuple[int, ...]], float | None]
    most: float = inf
    best: Found | None = field(default=None, init=False)

    @cached_property
    def costs(self) -> list[Floats]:
        """The sum of costs, as it is joined."""
        return self.order.joined(self.cost)

    @cached_property
    def weights(self) -> list[Floats]:
        """The sum of weights, likewise."""
        return self.order.joined(self.weight)

    @property
    def least_weight(self) -> float:
        """Of any values."""
        return self.order.total(self.weights)

    def found(self) -> Found | None:
        """The cheapest values within the room; None where there are none that cost less than `most`.

        Raises:
            TooMany: it takes more to tell.
        """
        if self.least_weight > self.room:
            return None
        cheapest = self.order.followed_back(self.costs)
        bound = self.order.total(self.costs)
        if bound >= self._limit:
            return None
        if self._weight(cheapest) <= self.room:
            self._take(cheapest)
            mixed = self.costs
        else:
            bound, mixed = self._at_best_rate(cheapest)
        for num_parts in (FEW, MAX_LOOKS):  # what is good is found soon, and leaves few that may be better
            if bound < self._limit:
                self._look_through(bound, mixed, num_parts)
        return self.best

    @property
    def _limit(self) -> float:
        """What is worth a look costs less."""
        least = self.most if self.best is None else self.best.cost
        return least - CLOSE * abs(least) if least < inf else inf

    def _weight(self, values: tuple[int, ...]) -> float:
        return self.order.at(self.weight, values)

    def _take(self, values: tuple[int, ...]) -> None:
        """Keeps values within the room if they are the cheapest so far."""
        cost = self.judge(values)
        if cost is not None and cost < self._limit:
            self.best = Found(cost, values)

    def _at_best_rate(self, cheap: tuple[int, ...]) -> tuple[float, list[Floats]]:
        """What all values within the room cost at least, and the sum that says so, as it is joined.

        Args:
            cheap: values beyond the room.
        """
        light = self.order.followed_back(self.weights)
        self._take(light)
        least, rate, mixed = self._cost(cheap), 0.0, self.costs
        above, below = (self._cost(cheap), self._weight(cheap)), (self._cost(light), self._weight(light))
        for _ in range(MAX_RATES):
            if below[0] <= above[0]:
                break
            rate = (below[0] - above[0]) / (above[1] - below[1])
            mixed = self.order.joined([cost + rate * weight for cost, weight in zip(self.cost, self.weight, strict=True)])
            least, values = self.order.total(mixed), self.order.followed_back(mixed)
            ends = below[0] + rate * below[1]
            if least >= ends - CLOSE * abs(ends) or values in (light, cheap):
                break
            sums = self._cost(values), self._weight(values)
            if sums[1] > self.room:
                cheap, above = values, sums
            else:
                light, below = values, sums
                self._take(light)
        return least - rate * self.room, mixed

    def _cost(self, values: tuple[int, ...]) -> float:
        return self.order.at(self.cost, values)

    def _look_through(self, bound: float, mixed: Sequence[Floats], num_parts: int) -> None:
        """Looks at all values that may be within the room and cheaper than the best.

        Of those that go on alike what neither costs nor weighs less than another is left out.

        Args:
            bound: below them all.
            mixed: the sum that says so, as it is joined.
        """
        room = self.room + CLOSE * abs(self.room)
        alive: dict[tuple[int, ...], list[Part]] = {(): [(self.order.total(self.costs), self.least_weight, bound, None)]}
        num_looks, known, limit = 0, tuple[int, ...](), self._limit
        for number, needed in self._turns:
            step = self.order.steps[number]
            adds = _Adds((self.costs[number], self.weights[number], mixed[number]))
            met = _picker([known.index(variable) for variable in step.met])
            left = _picker([(*known, step.variable).index(variable) for variable in needed])
            known = needed
            found: dict[tuple[int, ...], list[Part]] = {}
            for values, parts in alive.items():
                for cost, weight, least, value in adds[met(values)]:
                    found.setdefault(left((*values, value)), []).extend(
                        (so_far + cost, heavy + weight, below + least, (value, trail))
                        for so_far, heavy, below, trail in parts
                        if so_far + cost < limit and below + least < limit and heavy + weight <= room
                    )
                num_looks += len(parts)
            if num_looks > MAX_LOOKS:
                raise TooMany
            alive = _best(found, num_parts)
        for *_, trail in alive.get((), ()):  # the cheapest first
            self._take(self._values(trail))

    @cached_property
    def _turns(self) -> list[tuple[int, tuple[int, ...]]]:
        """The steps in the order in which their variables get values, each with the variables that are met after it.

        Those that a variable was eliminated into come before it, and what hangs on it right after, so that few are met later.
        """
        number_of = {step.variable: number for number, step in enumerate(self.order.steps)}
        hanging: dict[int | None, list[int]] = {}
        for number, step in enumerate(self.order.steps):
            above = min((number_of[variable] for variable in step.met), default=None)
            hanging.setdefault(above, []).append(number)
        left, turns = hanging.get(None, [])[::-1], list[int]()
        while left:
            number = left.pop()
            turns.append(number)
            left += sorted(hanging.get(number, ()), key=lambda other: -other)
        needed, found = set[int](), list[tuple[int, tuple[int, ...]]]()
        for number in turns[::-1]:
            found.append((number, tuple(sorted(needed))))
            needed = needed - {self.order.steps[number].variable} | set(self.order.steps[number].met)
        return found[::-1]

    def _values(self, left: Trail) -> tuple[int, ...]:
        values = [0] * len(self.order.sizes)
        for number, _ in self._turns[::-1]:
            assert left is not None, "a part of all steps has a value of each variable"
            values[self.order.steps[number].variable], left = left
        return tuple(values)


class _Adds(dict[tuple[int, ...], list[tuple[float, float, float, int]]]):
    """What each value of a variable adds to the least cost, weight and sum of both, by the values of those that it met."""

    def __init__(self, tables: Sequence[Floats]) -> None:
        self._tables = [np.moveaxis(table, 0, -1) for table in tables]

    def __missing__(self, met: tuple[int, ...]) -> list[tuple[float, float, float, int]]:
        own = [table[met] for table in self._tables]
        added = [(each - each.min()).tolist() for each in own]
        self[met] = [(*sums, value) for value, sums in enumerate(zip(*added, strict=True)) if inf not in sums]
        return self[met]


def _best(found: Mapping[tuple[int, ...], list[Part]], most: int) -> dict[tuple[int, ...], list[Part]]:
    """The parts that cost less or weigh less than others that go on alike; of more than so many those that may cost least in the end."""
    kept = {values: _undominated(parts) for values, parts in found.items()}
    if sum(map(len, kept.values())) > most:
        limit = sorted(least for parts in kept.values() for _, _, least, _ in parts)[most - 1]
        kept = {values: [part for part in parts if part[2] <= limit] for values, parts in kept.items()}
    return {values: parts for values, parts in kept.items() if parts}


def _undominated(parts: list[Part]) -> list[Part]:
    """Those that cost less or weigh less than any other; the cheapest first."""
    if len(parts) < 2:
        return parts
    found, lightest = list[Part](), inf
    for part in sorted(parts, key=itemgetter(0, 1)):
        weight = part[1]
        if weight < lightest - NOISE * abs(weight):
            found.append(part)
            lightest = weight
    return found


def _picker(places: Sequence[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Takes what stands in these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)
