"""All strategies that a search ranges over: every one on few devices, those of identical devices in a row on many."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice, permutations, product

from whale.ir.cluster import Cluster, Device, Host
from whale.planning.strategy import Placed, RankSpec, ReplicaSpec, Strategy
from whale.search.freedom import Freedom, Order

COMPLETE = 4
"""On up to so many devices every strategy is looked at, by the names of its devices."""

FORMS = 4
"""Beside replicas of other kinds so many forms of the replicas of one kind are looked at."""

DEEPEST = 64
"""Replicas over several kinds have at most so many ranks, where there are many devices."""

PAIR = 2
"""Of more kinds along a pipeline all have split groups of one width, where there are many devices."""

HALF_WAY = 2**0.5
"""From a power of two to the next."""


@dataclass(frozen=True)
class Space:
    """The strategies for a model on a cluster.

    Attributes:
        cluster: the devices there are.
        freedom: what may be chosen.
        num_rows: of the global batch; every device takes a row of every micro-batch.
        num_places: stages that the model can be cut into at most.
        can_split: whether something of the model can be cut over so many devices of a kind.
    """

    cluster: Cluster
    freedom: Freedom
    num_rows: int
    num_places: int
    can_split: Callable[[Device, int], bool]

    @cached_property
    def counts(self) -> Mapping[Device, int]:
        """Devices of each kind."""
        return Counter(device.kind for device in self.cluster.devices)

    @cached_property
    def widths(self) -> Mapping[Device, tuple[int, ...]]:
        """Per kind, the sizes of split groups that fit on a host: powers of two."""
        return {
            kind: tuple(width for width in powers_of_two(max(numbers)) if width == 1 or self.can_split(kind, width))
            for kind, numbers in self._on_hosts.items()
        }

    @property
    def is_small(self) -> bool:
        """Whether every strategy is looked at."""
        return len(self.cluster.devices) <= COMPLETE

    def lineups(self, seconds: Callable[[ReplicaSpec, int], float]) -> Iterator[Strategy]:
        """All sets of replicas, each once, without order and micro-batches.

        Args:
            seconds: that replicas of one kind take for their share of the rows, in so many micro-batches.
        """
        found = self._every() if self.is_small else self._in_a_row(seconds)
        for strategy in dict.fromkeys(found):
            if self._is_allowed(strategy) and (self.freedom.using is None or strategy.taken.get(self.freedom.using)):
                yield from (Strategy(strategy.replicas, near=near) for near in self._rules(strategy))

    def turns(self, strategy: Strategy) -> tuple[Sequence[Order], Sequence[int]]:
        """The orders that differ for a set of replicas, and numbers of micro-batches; one micro-batch has no turns but those of the first.

        A replica of one rank has nothing to order.
        """
        deepest = strategy.deepest.num_ranks
        orders = [order for order in self.freedom.orders[: 1 if deepest == 1 else None] if deepest * order.num_chunks <= self.num_places]
        return orders, self.micro_batches(self.num_rows // strategy.num_replicas)

    def micro_batches(self, most: int) -> Sequence[int]:
        """Numbers of micro-batches, up to a most."""
        fixed = self.freedom.micro_batches
        if fixed is None:
            return micro_batch_counts(self.num_rows, most)
        return (fixed,) if fixed <= most else ()

    def _rules(self, strategy: Strategy) -> tuple[bool | None, ...]:
        """By which rules devices without names get them."""
        if strategy.replicas[0].names is not None:
            return (None,)
        if self.freedom.near is not None:
            return (self.freedom.near,)
        is_one_way = all(each.count == 1 or max(each.numbers.values()) == 1 for each in strategy.replicas)
        return (True,) if is_one_way else (True, False)

    @property
    def _num_ranks(self) -> int | None:
        """Of each replica, where it is set: of more stages than there are devices consecutive ones share one."""
        return None if self.freedom.num_ranks is None else min(self.freedom.num_ranks, len(self.cluster.devices))

    def _is_allowed(self, strategy: Strategy) -> bool:
        own = strategy.unnamed.replicas
        deep = all(each.num_ranks <= self.num_places and self._num_ranks in (None, each.num_ranks) for each in own)
        return deep and (not self.freedom.alike or (len(own) == 1 and (not own[0].is_split or own[0].count == 1)))

    def _every(self) -> Iterator[Strategy]:
        """All replicas on all choices of devices; of devices and hosts that stand for one another one choice."""
        seen, near = set[object](), self.freedom.near
        if near is not None:
            found: Iterator[Strategy] = self._in_a_row(lambda replica, count: 0.0)
            yield from found
            return
        for rows in _rows([device.name for device in self.cluster.devices]):
            for placed in self._grouped(rows):
                look = self._look(placed)
                if placed and look not in seen:
                    seen.add(look)
                    kinds = self.cluster.by_name
                    yield Strategy(
                        tuple(ReplicaSpec(tuple(RankSpec(kinds[names[0]].kind, len(names)) for names in own), names=own) for own in placed)
                    )

    def _grouped(self, rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[Placed, ...]]:
        """All ways to make split groups of neighbours in each row: of one kind on one host."""
        if not rows:
            yield ()
            return
        for own in self._groups(rows[0]):
            yield from ((own, *others) for others in self._grouped(rows[1:]))

    def _groups(self, row: Sequence[str]) -> Iterator[Placed]:
        if not row:
            yield ()
            return
        devices = [self.cluster.by_name[name] for name in row]
        for width in self.widths[devices[0].kind]:
            if width <= len(row) and len({(own.kind, own.host) for own in devices[:width]}) == 1:
                yield from ((tuple(row[:width]), *others) for others in self._groups(row[width:]))

    def _look(self, placed: Sequence[Placed]) -> object:
        """What is equal for replicas on devices that stand for one another."""
        hosts, by_name = self.cluster.hosts, self.cluster.by_name
        looks = host_looks(self.cluster)
        number = {host.name: place for place, host in enumerate(hosts)}
        found = []
        for order in permutations(range(len(hosts))):
            if all(looks[hosts[place].name] == looks[hosts[other].name] for place, other in enumerate(order)):
                own = (
                    tuple(tuple(sorted((order[number[by_name[name].host]], self._kinds[name]) for name in names)) for names in replica)
                    for replica in placed
                )
                found.append(tuple(sorted(own)))
        return min(found)

    @cached_property
    def _kinds(self) -> Mapping[str, int]:
        """Per device a number that devices of one kind and price share."""
        known: dict[object, int] = {}
        return {device.name: known.setdefault((device.kind, device.price_per_hour), len(known)) for device in self.cluster.devices}

    def _in_a_row(self, seconds: Callable[[ReplicaSpec, int], float]) -> Iterator[Strategy]:
        """Replicas of one kind each, of every kind its own; and replicas over several kinds, identical devices in a row."""
        for replica in (replica for kind in self.counts for replica in self._of_one_kind(kind)):
            yield Strategy((replica,))
            for count in self._fewer(replica):
                yield Strategy((replace(replica, count=count),))
        forms = ([None, *self._forms(kind, seconds)] for kind in self.counts)
        for used in product(*forms):
            own = tuple(replica for replica in used if replica is not None)
            if own:
                yield Strategy(own)
        for number in range(2, len(self.counts) + 1):
            for kinds in permutations(self.counts, number):
                for mixed in self._of_kinds(kinds):
                    yield Strategy((mixed,))
                    left = {kind: count - mixed.taken.get(kind, 0) for kind, count in self.counts.items()}
                    rest = tuple(ReplicaSpec((RankSpec(kind),), count) for kind, count in left.items() if count)
                    if rest:
                        yield Strategy((mixed, *rest))

    def _fewer(self, replica: ReplicaSpec) -> Sequence[int]:
        """Numbers of replicas of one kind that leave others of it out: those of one host, and any where fewer may be the best."""
        kind = (replica.ranks or ())[0].kind
        of_host = max(self._on_hosts[kind]) // (replica.num_devices // replica.count)
        counts = {of_host, *(powers_of_two(replica.count - 1) if self.freedom.fewer else ())}
        return sorted(count for count in counts if 0 < count < replica.count)

    def _of_one_kind(self, kind: Device) -> Iterator[ReplicaSpec]:
        """As many replicas as there are devices for, of each depth and width."""
        for width in self.widths[kind]:
            room = self._room(kind, width)
            for num_ranks in self._depths(room):
                yield ReplicaSpec((RankSpec(kind, width),) * num_ranks, room // num_ranks)

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

    def _forms(self, kind: Device, seconds: Callable[[ReplicaSpec, int], float]) -> Sequence[ReplicaSpec]:
        """The replicas of one kind that take least time for their share of the rows, and copies of the model."""
        allowed = [replica for replica in self._of_one_kind(kind) if self._is_allowed(Strategy((replica,)))]
        plain = [replica for replica in allowed if replica.num_devices == replica.count]
        others = [replica for replica in allowed if replica not in plain]

        def least(replica: ReplicaSpec) -> float:
            return min(seconds(replica, count) for count in self.micro_batches(self.num_rows // replica.count) or (1,))

        return [*plain, *sorted(others, key=least)[: FORMS - len(plain)]]

    def _of_kinds(self, kinds: tuple[Device, ...]) -> Iterator[ReplicaSpec]:
        """Replicas that take of each of these kinds, as many as there are devices for; of two kinds each may have its own width."""
        for widths in product(*(self.widths[kind] for kind in kinds)):
            if len(kinds) > PAIR and len(set(widths)) > 1:
                continue
            ranks = tuple(map(RankSpec, kinds, widths))  # one for all ranks of a kind: it is hashed and compared soonest
            rooms = [self._room(kind, width) for kind, width in zip(kinds, widths, strict=True)]
            for depths in self._divisions(rooms):
                count = min(room // depth for room, depth in zip(rooms, depths, strict=True))
                yield ReplicaSpec(tuple(rank for rank, depth in zip(ranks, depths, strict=True) for _ in range(depth)), count)

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


def _rows(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to put some of the devices in rows; a row stands where its first device does."""
    if not names:
        yield ()
        return
    first, others = names[0], names[1:]
    yield from _rows(others)  # the first stays idle
    for size in range(len(others) + 1):
        for chosen in permutations(others, size):
            rest = [name for name in others if name not in chosen]
            for place in range(size + 1):
                own = (*chosen[:place], first, *chosen[place:])
                yield from ((own, *more) for more in _rows(rest))


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


def host_looks(cluster: Cluster) -> Mapping[str, object]:
    """Per host, what is equal for hosts that stand for one another: what they have, where all are linked in one way."""

    def look(host: Host) -> object:
        prices = tuple(device.price_per_hour for device in host.devices), host.price_per_hour
        return tuple(device.kind for device in host.devices), prices, host.link, host.card, host.name if cluster.pairs else ""

    return {host.name: look(host) for host in cluster.hosts}


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
