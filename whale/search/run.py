"""One search under way: what was planned and estimated so far, the best of it, and how much effort is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappush, heapreplace

from whale.config.keys import Shares
from whale.errors import WhaleError
from whale.ir.cluster import Cluster
from whale.planning.seating import Seater, Seating
from whale.planning.shard.insisting import NothingToCut
from whale.search.arrangement import Arrangement, Order
from whale.search.found import NUM_RUNNERS_UP
from whale.search.progress import Progress
from whale.search.space.freedom import Freedom
from whale.search.space.naming import Seats, namings

SPLIT_EFFORT = 6
"""A plan with split stages takes about so many times as long to make."""

DEVICES_PER_PLAN = 64
"""So many devices take about as long as all else that there is to making a small plan."""

TASKS_PER_PLAN = 64
"""So many tasks of the simulation likewise."""


FEW = 20
"""Runners-up that cannot be better are planned only where so many of them would be no effort."""

PATIENCE = 500
"""A plan of which so many would be the effort that is left is made if its sketch is up to twice the best plan, others likewise."""


NUM_TRIES = 6
"""While nothing fits, so many plans are made beyond the effort."""

AT_ONCE = 64
"""Of so many the first bound of their own is worked out together, then of twice as many."""

MOST_AT_ONCE = 2048
"""And so on up to so many."""

ROOM = 0.85
"""Each of them is of an arrangement that would fit, by its sketch, in so much less memory than the one before."""


@dataclass(eq=False)
class Look:
    """An arrangement that may be looked at.

    Attributes:
        arrangement: what it is.
        near: the rule by which its devices get names; None for every way.
        bound: what none of its plans is below, by the objective: first that of its line-up.
        own_bounds: work out bounds of their own for arrangements, each dearer than the one before; the first is quick for many at once.
        fits: whether it would fit, roughly, in this share of the memory.
        likely: what its plans come to, roughly; infinite where they seem not to fit.
        effort: how many small plans take as long to make as one of its own.
        is_must: whether it is planned whatever effort it takes, where it may be better.
        num_known: of its own bounds.
    """

    arrangement: Arrangement
    near: bool | None
    bound: float
    own_bounds: Sequence[Callable[[Sequence[Arrangement]], Sequence[float]]]
    fits: Callable[[Arrangement, float], bool]
    likely: float
    effort: float
    is_must: bool = False
    num_known: int = field(default=0, init=False)

    @property
    def is_refined(self) -> bool:
        """Whether its bound is the best that there is."""
        return self.num_known == len(self.own_bounds)

    def refine(self) -> None:
        """Works out the next bound of its own."""
        self.take(*self.own_bounds[self.num_known]([self.arrangement]))

    def take(self, bound: float) -> None:
        """Has that for its next bound."""
        self.bound = max(self.bound, bound)
        self.num_known += 1

    def may_be_below(self, value: float) -> bool:
        """Whether one of its plans may be, by its own bounds."""
        while self.bound < value and not self.is_refined:
            self.refine()
        return self.bound < value


@dataclass(frozen=True, slots=True)
class Closed:
    """Arrangements that were not looked at.

    Attributes:
        bound: what none of their plans is below.
        same: what is equal for the same ones.
        number: how many there are.
        open: tells how to look at them.
    """

    bound: float
    same: Hashable
    number: int
    open: Callable[[], Iterable[Look]]


@dataclass(eq=False, kw_only=True)
class FreeRun(Progress):
    """A search over arrangements.

    Args:
        freedom: what may be chosen.
        cluster: the devices.
        seater: makes plans.

    Attributes:
        unproven: bounds of what was not looked at, or not to its end.
    """

    freedom: Freedom
    cluster: Cluster
    seater: Seater
    unproven: list[Look] = field(default_factory=list, init=False)
    _num_tries: int = field(default=0, init=False)

    def look_at(self, looks: Sequence[Look]) -> None:
        """Plans what may be better than the best plan by its bound, one after another, as far as the effort goes."""
        for look in looks:
            is_done = False
            if self._is_beyond(look):  # most are, of thousands
                self.unproven.append(look)
                continue
            with self.kept():
                is_done = not self.was_interrupted and self._is_worth(look) and self._plan(look)
            if not is_done:
                self.unproven.append(look)

    def _is_beyond(self, look: Look) -> bool:
        """Whether there is a plan, and no effort left for this one."""
        return self.best is not None and look.effort > self.effort and not look.is_must

    def _is_worth(self, look: Look) -> bool:
        """Whether to plan what may be better, and a few that are not, to have something beside the best plan.

        The very first plan is made whatever it takes. The more of the effort that is left another takes, the more it must promise.
        """
        effort = look.effort
        if not self.num_planned and not self.faults:
            return True
        if effort > self.effort and not look.is_must:
            return self._is_roomy(look)
        if self.best is None:
            return True
        is_beside = len(self.drafts) <= NUM_RUNNERS_UP and effort * FEW <= self.effort
        if look.bound >= self.best.value:
            return is_beside
        is_small = self.num_arrangements * effort <= self.effort
        promises = look.is_must or is_small or look.likely <= self.best.value * (1 + self.effort / effort / PATIENCE)
        return promises and (look.may_be_below(self.best.value) or is_beside)

    def _is_roomy(self, look: Look) -> bool:
        """Whether it is one of the few that are tried beyond the effort because nothing fits."""
        if self._num_tries == NUM_TRIES or not look.fits(look.arrangement, ROOM ** (self._num_tries + 1)):
            return False
        self._num_tries += 1
        return True

    def _plan(self, look: Look) -> bool:
        """Drafts an arrangement in all namings and keeps the best; whether there was effort enough for all of them."""
        effort, is_first = look.effort, True
        for seats, policy in self._ways(look):
            if effort > self.effort and not is_first and not look.is_must:
                return False
            self.effort, is_first = self.effort - effort, False
            try:
                draft = self.seater.draft(self._seatings(look.arrangement, seats), policy)
            except WhaleError as fault:
                self.faults.append(fault)
                if isinstance(fault, NothingToCut):  # seen before any axis was weighed, which is what takes long
                    self.effort += effort * (1 - 1 / SPLIT_EFFORT)
                continue
            self.add(look.arrangement, draft)
        self.tell_all()
        return True

    @property
    def reach(self) -> float:
        """What seems to come to more than this is not planned, whatever its bound, now that there is a plan."""
        if self.best is None or self.num_arrangements <= self.effort:
            return math.inf
        return self.best.value * (1 + self.effort / PATIENCE)

    def open_bounds(self, closed: Iterable[Closed] = ()) -> list[float]:
        """Bounds below the best plan of what was not looked at, least first; the least of them is an arrangement's own.

        The dearer bounds are worked out one by one, of what is least.

        Args:
            closed: what was not even opened, as far as its bounds are below the best plan.
        """
        assert self.best is not None
        value = self.best.value
        waiting = [Closed(look.bound, look.arrangement, 1, partial(_only, look)) for look in self.unproven if look.bound < value]
        waiting = sorted({each.same: each for each in (*closed, *waiting)}.values(), key=lambda each: each.bound)
        known, rest, size = dict[Arrangement, Look](), 0, AT_ONCE
        heap = list[tuple[float, int, Look]]()
        while heap or rest < len(waiting):
            if rest < len(waiting) and not (heap and heap[0][0] < waiting[rest].bound):
                new = list[Look]()
                while rest < len(waiting) and len(new) < size:
                    new += [look for look in waiting[rest].open() if look.arrangement not in known]
                    rest += 1
                known.update((look.arrangement, look) for look in new)
                refine_together(new)
                for look in new:
                    heappush(heap, (look.bound, len(heap), look))
                size = min(2 * size, MOST_AT_ONCE)
                continue
            look = heap[0][2]
            if look.is_refined:
                break
            look.refine()
            heapreplace(heap, (look.bound, heap[0][1], look))
        found = [look.bound for look in known.values() if look.bound < value]
        return sorted(found + [each.bound for each in waiting[rest:] for _ in range(each.number)])

    def _ways(self, look: Look) -> Iterator[tuple[Seats, str | Shares]]:
        for seats in namings(look.arrangement, self.cluster, near=look.near):
            yield from ((seats, policy) for policy in self.freedom.policies)

    def _seatings(self, arrangement: Arrangement, seats: Seats) -> tuple[Seating, ...]:
        """A replica of one rank has the plain order."""

        def order(num_ranks: int) -> Order:
            return arrangement.order if num_ranks > 1 else self.freedom.orders[0]

        return tuple(
            Seating(order(len(placed)).schedule, order(len(placed)).num_chunks, arrangement.num_micro_batch, placed) for _, placed in seats
        )


def _only(look: Look) -> tuple[Look]:
    return (look,)


def refine_together(looks: Iterable[Look]) -> None:
    """Works out the first bound of their own of those that have none yet."""
    new = [look for look in looks if not look.num_known]
    if not new:
        return
    for look, bound in zip(new, new[0].own_bounds[0]([look.arrangement for look in new]), strict=True):
        look.take(bound)


def effort(num_devices: int, num_tasks: int, *, is_split: bool) -> float:
    """How many small plans take as long to make as one of so many devices and tasks of the simulation."""
    plan = 1 + num_devices / DEVICES_PER_PLAN + num_tasks / TASKS_PER_PLAN
    return plan * (SPLIT_EFFORT if is_split else 1)
