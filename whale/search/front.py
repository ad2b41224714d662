"""The arrangements of a space in the order of what they promise: by rough times of all, and by sketches of what may come first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush

from whale.ir.cluster import Device
from whale.search.arrangement import Arrangement, Order
from whale.search.climb import climbed
from whale.search.objective import Objective
from whale.search.run import Look, effort
from whale.search.sketch.rough import RULES, Rough
from whale.search.sketch.sketch import Sketches
from whale.search.space.space import Lineup, Space

EASE = 5e-4
"""What takes as much effort as a small plan is looked at as if it were slower by this share: many are about equally fast."""

SLACK = 1.05
"""What is roughly above the best sketch by so much is not sketched until a plan says how good that is."""


@dataclass(eq=False, slots=True)
class Group:
    """Arrangements that differ in their micro-batches alone; there are thousands, most of which nobody looks at.

    Attributes:
        teams, order: of all of them.
        micro_batches: of each.
        near: the rule by which their devices get names; None for every way.
        place: of the line-up among all.
        rough: what each roughly comes to, at least: without the end of a step, until that `is_known`.
    """

    teams: Lineup
    order: Order
    micro_batches: Sequence[int]
    near: bool | None
    place: int
    rough: Sequence[float]
    is_known: bool = False

    @property
    def entry(self) -> tuple[float, bool]:
        """Where it stands: by the least that one of them comes to; what may be more comes first."""
        return min(self.rough), self.is_known

    @property
    def own(self) -> tuple[Arrangement, ...]:
        """The arrangements, by their micro-batches."""
        return tuple(Arrangement(self.teams, self.order, number) for number in self.micro_batches)

    @property
    def num_devices(self) -> int:
        return sum(team.num_devices for team in self.teams)


_Entry = tuple[float, bool, int, Group]
"""A group behind the place where it stands, and less its number."""


@dataclass(eq=False)
class Front:
    """What there is to be looked at.

    Args:
        space: of arrangements.
        sketches: of them.
        objective: judges.

    Attributes:
        num_arrangements: in all line-ups that may fit.
    """

    space: Space
    sketches: Sketches
    objective: Objective
    num_arrangements: int = field(default=0, init=False)

    @cached_property
    def lineups(self) -> tuple[Lineup, ...]:
        """All line-ups."""
        return tuple(self.space.lineups(self.sketches))

    def known(self, arrangements: Sequence[Arrangement]) -> list[Look]:
        """Arrangements that are good elsewhere, and that there are devices for; they need not be in the space."""
        found = list[Look]()
        for each in arrangements:
            taken = Counter[Device]()
            for team in each.teams:
                taken.update(team.taken)
            if all(self.space.counts.get(kind, 0) >= number for kind, number in taken.items()):
                work = effort(each.num_devices, each.num_tasks, is_split=each.is_split)
                found += [Look(each, near, self._fits, 0.0, work, is_must=True) for near in self.space.rules(each.teams)]
        return found

    def promising(self) -> list[Look]:
        """The arrangements that may be the best plan, as far as sketches tell; those that promise most first.

        Copies of the model come next after the first: the plan without a search is looked at, if it is near the best.
        """
        found = list(self._plain())
        best = min((look.likely for look in found), default=math.inf)
        while (group := self._next(SLACK * best)) is not None:
            looks = list(self._sketched(group))
            best = min(best, *(look.likely for look in looks))
            found += looks
        found = self._in_turn(found)
        first = min(found, key=lambda look: look.likely, default=None)  # it is planned whatever effort it takes
        return sorted(found, key=lambda look: (look is not first, not look.is_must))

    def others(self, value: Callable[[], float], reach: Callable[[], float]) -> Iterator[Look]:
        """The arrangements that were not promising enough, those that roughly come to least first.

        Args:
            value: of the best plan so far: what roughly comes to more is not sketched.
            reach: what roughly comes to more than this is not looked at.
        """
        while (group := self._next(reach())) is not None:
            yield from self._in_turn(list(self._sketched(group) if min(group.rough) < value() else self._looks(group, group.rough)))

    def _plain(self) -> Iterator[Look]:
        """Copies of the model on as many devices as can be, and the copies that roughly are the best."""
        plain = [each for each in self._left if all(team.one.num_devices == 1 for team in each[-1].teams)]
        if not plain:
            return
        self._left[:] = [each for each in self._left if each not in plain]
        plain = sorted(map(self._known, plain))
        most = max(plain, key=lambda each: each[-1].num_devices)
        self._left += [each for each in plain if each not in (most, plain[0])]
        heapify(self._left)
        for entry in dict.fromkeys((most, plain[0])):
            for number, look in enumerate(self._sketched(entry[-1])):
                look.is_must = number == 0
                yield look

    @cached_property
    def _left(self) -> list[_Entry]:
        """A heap of what was not looked at; of equal ones the deepest first."""
        heap = [(*group.entry, -number, group) for number, group in enumerate(self._groups())]
        heapify(heap)
        return heap

    def _next(self, limit: float) -> Group | None:
        """What roughly comes to least, if that is no more than a limit; it is left no longer."""
        while self._left and self._left[0][0] <= limit:
            entry = heappop(self._left)
            if entry[1]:
                return entry[-1]
            heappush(self._left, self._known(entry))
        return None

    def _known(self, entry: _Entry) -> _Entry:
        """A group with the end of its steps."""
        *_, number, group = entry
        if not group.is_known:
            rough, near = self._rough, group.near is not False
            start = rough.micro_batches.index(group.micro_batches[0])  # they are all that there are from one to another
            stop, order = start + len(group.micro_batches), rough.orders.index(group.order)
            seconds = rough.passes[group.place, order, RULES.index(near), start:stop] + rough.end(group.place, near=near)[start:stop]
            group.rough = self.objective.likely(group.teams, group.order, group.micro_batches, seconds.tolist())
            group.is_known = True
        return *group.entry, number, group

    @cached_property
    def _turns(self) -> Sequence[tuple[Lineup, Mapping[Order, Sequence[int]]]]:
        """The line-ups that may fit, with their orders and numbers of micro-batches."""
        fitting = (lineup for lineup in self.lineups if not any(map(self.sketches.shortage, lineup)))
        return [(lineup, turns) for lineup in fitting if (turns := self.space.turns(lineup))]

    @cached_property
    def _rough(self) -> Rough:
        counts = sorted({count for _, turns in self._turns for own in turns.values() for count in own})
        return Rough(self.sketches, [lineup for lineup, _ in self._turns], self.space.freedom.orders, counts)

    def _groups(self) -> Iterator[Group]:
        """All arrangements."""
        rough = self._rough
        passes = rough.passes.tolist()
        for place, (lineup, turns) in enumerate(self._turns):
            asked = self.space.rules(lineup)
            for near in asked:
                for order, own in turns.items():
                    start = rough.micro_batches.index(own[0])
                    seconds = passes[place][rough.orders.index(order)][RULES.index(near is not False)][start : start + len(own)]
                    self.num_arrangements += near is asked[0] and len(own)
                    yield Group(lineup, order, own, near, place, self.objective.likely(lineup, order, own, seconds))

    def _looks(self, group: Group, likely: Sequence[float]) -> Iterator[Look]:
        own = group.own
        num_devices, is_split, num_stages = group.num_devices, own[0].is_split, own[0].num_tasks // own[0].num_micro_batch
        for arrangement, seconds in zip(own, likely, strict=True):
            work = effort(num_devices, num_stages * arrangement.num_micro_batch, is_split=is_split)
            yield Look(arrangement, group.near, self._fits, seconds, work)

    def _fits(self, arrangement: Arrangement, share: float) -> bool:
        """Whether it would fit in this share of the memory, with equal rows for all replicas."""
        rows = self.sketches.num_rows / arrangement.num_replicas
        order, m = arrangement.order, arrangement.num_micro_batch
        return all(self.sketches.fits(team, rows, share, m, order) for team in arrangement.teams)

    def _sketched(self, group: Group) -> Iterator[Look]:
        """A group, sketched from what is roughly its best towards the best; the others by their nearest."""
        own, roughly = group.own, min(range(len(group.own)), key=group.rough.__getitem__)
        known = climbed(len(own), roughly, lambda place: self._likely(own[place], group.near))
        nearest = [min(known, key=lambda other: abs(other - index)) for index in range(len(own))]
        return self._looks(group, [known[other] * (1 + abs(other - index)) for index, other in enumerate(nearest)])

    def _likely(self, arrangement: Arrangement, near: bool | None) -> float:
        rules = (True, False) if near is None else (near,)
        seconds = min(self.sketches.seconds(arrangement, near=rule) for rule in rules)
        return self.objective.likely(arrangement.teams, arrangement.order, (arrangement.num_micro_batch,), (seconds,))[0]

    def _in_turn(self, looks: list[Look]) -> list[Look]:
        """Those that promise most first."""
        return sorted(looks, key=lambda look: (look.likely * (1 + EASE * look.effort), look.arrangement.num_devices))
