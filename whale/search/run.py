"""One search under way: what was planned and estimated so far, the best of it, and how much effort is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

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

NEAR = 1.25
"""Up to so many times what the best plan comes to."""

NUM_TRIES = 6
"""While nothing fits, so many plans are made beyond the effort."""

ROOM = 0.85
"""Each of them is of an arrangement that would fit, by its sketch, in so much less memory than the one before."""


@dataclass(eq=False, slots=True)
class Look:
    """An arrangement that may be looked at.

    Attributes:
        arrangement: what it is.
        near: the rule by which its devices get names; None for every way.
        fits: whether it would fit, roughly, in this share of the memory.
        likely: what its plans come to, roughly; infinite where they seem not to fit.
        effort: how many small plans take as long to make as one of its own.
        is_must: whether it is planned whatever effort it takes, where it seems to be near the best plan.
    """

    arrangement: Arrangement
    near: bool | None
    fits: Callable[[Arrangement, float], bool]
    likely: float
    effort: float
    is_must: bool = False


@dataclass(eq=False, kw_only=True)
class FreeRun(Progress):
    """A search over arrangements.

    Args:
        freedom: what may be chosen.
        cluster: the devices.
        seater: makes plans.
    """

    freedom: Freedom
    cluster: Cluster
    seater: Seater
    _num_tries: int = field(default=0, init=False)

    def look_at(self, looks: Iterable[Look]) -> None:
        """Plans what promises to be better than the best plan, one after another, as far as the effort goes."""
        with self.kept():
            for look in looks:
                if self.was_interrupted:
                    return
                if self._is_worth(look):
                    self._plan(look)

    def _is_worth(self, look: Look) -> bool:
        """Whether to plan what promises to be better, and a few that do not, to have something beside the best plan.

        The very first plan is made whatever it takes. The more of the effort that is left another takes, the more it must promise.
        """
        effort = look.effort
        if (look.is_must and look.likely <= NEAR * self.value()) or (not self.num_planned and not self.faults):
            return True
        if effort > self.effort:
            return self.best is None and self._is_roomy(look)
        if self.best is None:
            return True
        is_beside = len(self.drafts) <= NUM_RUNNERS_UP and effort * FEW <= self.effort
        return is_beside or look.likely <= self.reach(effort)

    def _is_roomy(self, look: Look) -> bool:
        """Whether it is one of the few that are tried beyond the effort because nothing fits."""
        if self._num_tries == NUM_TRIES or not look.fits(look.arrangement, ROOM ** (self._num_tries + 1)):
            return False
        self._num_tries += 1
        return True

    def _plan(self, look: Look) -> None:
        """Drafts an arrangement in all namings, as far as the effort goes, and keeps the best."""
        effort, is_first = look.effort, True
        for seats, policy in self._ways(look):
            if effort > self.effort and not is_first and not look.is_must:
                break
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


def effort(num_devices: int, num_tasks: int, *, is_split: bool) -> float:
    """How many small plans take as long to make as one of so many devices and tasks of the simulation."""
    plan = 1 + num_devices / DEVICES_PER_PLAN + num_tasks / TASKS_PER_PLAN
    return plan * (SPLIT_EFFORT if is_split else 1)
