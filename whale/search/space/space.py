"""All arrangements that a search ranges over: every one on few devices, those of like devices in a row on many."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice, permutations, product

from whale.ir.cluster import Cluster, Device
from whale.search.arrangement import Group, Order, Team
from whale.search.sketch.sketch import Sketches
from whale.search.space.freedom import Freedom

COMPLETE = 4
"""On up to so many devices every line-up is looked at, in whatever order its devices stand."""

FRONT = 4
"""Beside replicas of other kinds so many forms of the replicas of one kind are looked at."""

DEEPEST = 64
"""Replicas over several kinds have at most so many ranks, where there are many devices."""

PAIR = 2
"""Of more kinds along a pipeline all have split groups of one width, where there are many devices."""

HALF_WAY = 2**0.5
"""From a power of two to the next."""

Lineup = tuple[Team, ...]
Counts = Mapping[Device, int]


@dataclass(frozen=True)
class Space:
    """The arrangements of a model on a cluster.

    Attributes:
        cluster: the devices there are.
        freedom: what may be chosen.
        num_rows: of the global batch; every device takes a row of every micro-batch.
        num_places: stages that the model can be cut into at most.
    """

    cluster: Cluster
    freedom: Freedom
    num_rows: int
    num_places: int

    @cached_property
    def counts(self) -> Counts:
        """Devices of each kind."""
        return Counter(device.kind for device in self.cluster.devices)

    @cached_property
    def widths(self) -> Mapping[Device, tuple[int, ...]]:
        """Per kind, the sizes of split groups that fit on a host: powers of two; 1 alone where there shall be none."""
        return {kind: powers_of_two(count if self.freedom.splits else 1) for kind, count in self.in_one_host.items()}

    @cached_property
    def in_one_host(self) -> Counts:
        """Devices of each kind, on the host that has most of them."""
        return Counter({kind: max(numbers) for kind, numbers in self._on_hosts.items()})

    def lineups(self, sketches: Sketches) -> Iterator[Lineup]:
        """Which replicas there are, each line-up once.

        Args:
            sketches: tell which replicas of one kind are worth a look.
        """
        small = len(self.cluster.devices) <= COMPLETE
        for lineup in dict.fromkeys(self._every_lineup() if small else self._lineups_in_a_row(sketches)):
            if self._is_allowed(lineup) and (self.freedom.using is None or any(self.freedom.using in team.taken for team in lineup)):
                yield lineup

    def turns(self, lineup: Lineup) -> Mapping[Order, Sequence[int]]:
        """The orders that differ for a line-up, each with its numbers of micro-batches.

        A replica of one rank has nothing to order, and one micro-batch no turns.
        """
        counts = self._micro_batches(lineup, self.num_rows // sum(team.count for team in lineup))
        several = counts[bisect_right(counts, 1) :]
        deepest = max(team.num_ranks for team in lineup)
        orders = self.freedom.orders[: 1 if deepest == 1 else None]
        found = ((order, several if place else counts) for place, order in enumerate(orders))
        return {order: own for order, own in found if own and deepest * order.num_chunks <= self.num_places}

    def rules(self, lineup: Lineup) -> tuple[bool | None, ...]:
        """By which rules devices get names: replicas fill hosts (True), like devices are dealt out (False); None for every way."""
        if self.freedom.near is None and len(self.cluster.devices) <= COMPLETE:
            return (None,)
        if self.freedom.near is not None:
            return (self.freedom.near,)
        is_one_way = all(team.count == 1 or max(team.numbers.values()) == 1 for team in lineup)  # the next device of each kind by both
        return (True,) if is_one_way else (True, False)

    def _micro_batches(self, lineup: Lineup, most: int) -> Sequence[int]:
        fixed = self.freedom.micro_batches
        if fixed is None:
            return micro_batch_counts(self.num_rows, most)
        return (fixed,) if fixed <= most else ()

    @property
    def _num_ranks(self) -> int | None:
        """Of each replica, where it is set: of more stages than there are devices consecutive ones share one."""
        return None if self.freedom.num_ranks is None else min(self.freedom.num_ranks, len(self.cluster.devices))

    def _is_allowed(self, lineup: Lineup) -> bool:
        deep = all(team.num_ranks <= self.num_places and self._num_ranks in (None, team.num_ranks) for team in lineup)
        return deep and (not self.freedom.alike or (len(lineup) == 1 and (not lineup[0].is_split or lineup[0].count == 1)))

    def _every_lineup(self) -> Iterator[Lineup]:
        """All sets of replicas, by growing each with replicas that do not stand before its last."""
        words = list(self._words())

        def grown(taken: Counter[Team], left: Counter[Device], start: int) -> Iterator[Lineup]:
            for number in range(start, len(words)):
                need = Counter(words[number].taken)
                if need <= left:
                    more = taken + Counter([words[number]])
                    yield tuple(replace(team, count=count) for team, count in more.items())
                    yield from grown(more, left - need, number)

        yield from grown(Counter(), Counter(self.counts), 0)

    def _words(self) -> Iterator[Team]:
        """All replicas: split groups of any width along the pipeline."""
        groups = [Group(kind, width) for width in sorted({width for own in self.widths.values() for width in own}) for kind in self.counts]
        groups = [group for group in groups if group.width in self.widths[group.kind]]
        ends: list[Team] = [Team((), 1)]
        while ends:
            longer = (Team((*team.ranks, group), 1) for team in ends for group in groups)
            ends = [team for team in longer if all(number <= self.counts[kind] for kind, number in team.taken.items())]
            yield from ends

    def _lineups_in_a_row(self, sketches: Sketches) -> Iterator[Lineup]:
        """Replicas of one kind each, of every kind its own; and replicas over several kinds, like devices in a row."""
        for team in (team for kind in self.counts for team in self._of_one_kind(kind)):
            yield (team,)
            for count in self._fewer(team):
                yield (replace(team, count=count),)
        for used in product(*([None, *self._front(kind, sketches)] for kind in self.counts)):
            lineup = tuple(team for team in used if team is not None)
            if lineup:
                yield lineup
        for kinds in self._sequences():
            for mixed in self._of_kinds(kinds):
                yield (mixed,)
                left = {kind: count - mixed.taken.get(kind, 0) for kind, count in self.counts.items()}
                rest = tuple(Team((Group(kind),), count) for kind, count in left.items() if count)
                if rest:
                    yield (mixed, *rest)

    def _fewer(self, team: Team) -> Sequence[int]:
        """Numbers of replicas of one kind that leave others of it out: those of one host, and any where fewer may be the best."""
        of_host = self.in_one_host[team.ranks[0].kind] // team.one.num_devices
        counts = {of_host, *(powers_of_two(team.count - 1) if self.freedom.fewer else ())}
        return sorted(count for count in counts if 0 < count < team.count)

    def _of_one_kind(self, kind: Device) -> Iterator[Team]:
        """As many replicas as there are devices for, of each depth and width."""
        for width in self.widths[kind]:
            room = self._room(kind, width)
            for num_ranks in self._depths(room):
                yield Team((Group(kind, width),) * num_ranks, room // num_ranks)

    def _room(self, kind: Device, width: int) -> int:
        """Split groups of a width that there are on hosts, each on one."""
        return sum(number // width for number in self._on_hosts[kind])

    @cached_property
    def _on_hosts(self) -> Mapping[Device, tuple[int, ...]]:
        """Per kind, how many devices each host has of it."""
        found: dict[Device, list[int]] = {}
        for host in self.cluster.hosts:
            for kind, number in Counter(device.kind for device in host.devices).items():
                found.setdefault(kind, []).append(number)
        return {kind: tuple(numbers) for kind, numbers in found.items()}

    def _depths(self, room: int) -> Sequence[int]:
        """Numbers of ranks of replicas that share so many: 1, 2, 4 ..., and what each of 1, 2, 4 ... replicas would have."""
        most = min(room, self.num_places)
        if self._num_ranks is not None:
            return (self._num_ranks,) if self._num_ranks <= most else ()
        return sorted({*powers_of_two(most), *(min(room // count, most) for count in powers_of_two(room))})

    def _front(self, kind: Device, sketches: Sketches) -> Sequence[Team]:
        """The replicas of one kind that take least time for their share of the rows, and copies of the model, as far as they fit."""
        teams = [team for team in self._of_one_kind(kind) if self._is_allowed((team,)) and not sketches.shortage(team)]
        plain = [team for team in teams if team.one.num_devices == 1]
        return [*plain, *self._fastest([team for team in teams if team not in plain], FRONT - len(plain), sketches)]

    def _fastest(self, teams: Sequence[Team], number: int, sketches: Sketches) -> Sequence[Team]:
        """So many teams that take least time alone for their share of the rows, fastest first, with their best numbers of micro-batches."""
        order = self.freedom.orders[0]

        def seconds(team: Team) -> float:
            counts = self._micro_batches((team,), int(sketches.share_of(team))) or (1,)
            return min(sketches.about(team, order, count) for count in counts)

        return sorted(teams, key=seconds)[:number]

    def _sequences(self) -> Iterator[tuple[Device, ...]]:
        for number in range(2, len(self.counts) + 1):
            yield from permutations(self.counts, number)

    def _of_kinds(self, kinds: tuple[Device, ...]) -> Iterator[Team]:
        """Replicas that take of each of these kinds, as many as there are devices for; of two kinds each may have its own width."""
        for widths in product(*(self.widths[kind] for kind in kinds)):
            if len(kinds) > PAIR and len(set(widths)) > 1:
                continue
            groups = tuple(map(Group, kinds, widths))  # one for all its ranks: it is hashed and compared soonest
            rooms = [self._room(kind, width) for kind, width in zip(kinds, widths, strict=True)]
            for depths in self._divisions(rooms):
                count = min(room // depth for room, depth in zip(rooms, depths, strict=True))
                yield Team(tuple(group for group, depth in zip(groups, depths, strict=True) for _ in range(depth)), count)

    def _divisions(self, rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Ranks of each kind in a replica: what there is per replica, for every number of replicas that is worth it, and the deepest."""
        if self._num_ranks is not None:
            yield from divisions(min(self._num_ranks, self.num_places), rooms)
            return
        deepest = min(DEEPEST, self.num_places)
        for count in sorted({*powers_of_two(min(rooms)), min(rooms)}):
            if sum(room // count for room in rooms) <= deepest:
                yield tuple(room // count for room in rooms)
        if sum(rooms) > deepest:
            yield from islice(divisions(deepest, rooms), 1)


def divisions(total: int, rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to take a total of several kinds, some of each: by what there is of them first, then with as much as can be of one of them."""
    numbers = range(len(rooms))
    if not len(rooms) <= total <= sum(rooms):
        return
    for first in (None, *numbers):
        taken = [1 if number != first else min(rooms[number], total - len(rooms) + 1) for number in numbers]
        while sum(taken) < total:
            left = (number for number in numbers if taken[number] < rooms[number])
            taken[min(left, key=lambda number: taken[number] / rooms[number])] += 1
        yield tuple(taken)


def micro_batch_counts(num_rows: int, most: int) -> tuple[int, ...]:
    """Numbers of micro-batches up to a most: powers of two, and between two of them the divisor of the rows that is about half way."""
    known = _counts_of(num_rows)
    return known[: bisect_right(known, most)]


@cache
def _counts_of(num_rows: int) -> tuple[int, ...]:
    found = set(powers_of_two(num_rows))
    for low in powers_of_two(num_rows):
        between = (count for count in range(low + 1, min(2 * low, num_rows + 1)) if num_rows % count == 0)
        found |= set(sorted(between, key=lambda count: abs(count / low - HALF_WAY))[:1])
    return tuple(sorted(found))


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to a number."""
    return tuple(1 << exponent for exponent in range(most.bit_length()))
