"""All strategies that a search ranges over: every one on few devices, those with runs of identical devices on many."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, islice, permutations, product

from whale.ir.cluster import Cluster, Device, Host
from whale.planning.strategy import Placed, RankSpec, ReplicaSpec, Strategy
from whale.search.freedom import Freedom, Order

COMPLETE = 4  # up to this many devices every strategy is looked at, with named devices

FORMS = 4
"""Forms of one type's replicas that are combined with replicas of other types. Half of it: 4 % fewer strategies, double: half as many more,
for 64 devices of three types; the result is the same.
"""

# Figures of the next two: of 10 searches of examples/benchmarks/constants.py on 2, 8, 16 and 96 devices.

DEEPEST = 64  # most ranks of a replica over several device types, on many devices; halved or doubled: none differs

PAIR = 2
"""With more device types along a pipeline all split groups have one width, on many devices. 1: two searches are slower, by 4 and 29 %; 4:
none differs.
"""

HALF_WAY = 2**0.5  # from a power of two to the next, geometrically; 1.25 or 1.75: the results of 4 searches are the same


@dataclass(frozen=True)
class Space:
    """The strategies for a model on a cluster."""

    cluster: Cluster
    freedom: Freedom
    num_rows: int  # of the global batch; every device takes at least a row of every micro-batch
    num_places: int  # the most stages that the model can be cut into
    can_split: Callable[[Device, int], bool]  # whether something of the model can be cut over so many devices of a type

    @cached_property
    def counts(self) -> Mapping[Device, int]:
        return Counter(device.kind for device in self.cluster.devices)

    @cached_property
    def widths(self) -> Mapping[Device, tuple[int, ...]]:
        """Per device type, the sizes of split groups that fit on a host: powers of two, and all of its devices."""
        return {
            kind: tuple(
                width for width in sorted({*powers_of_two(max(numbers)), max(numbers)}) if width == 1 or self.can_split(kind, width)
            )
            for kind, numbers in self._on_hosts.items()
        }

    @property
    def is_small(self) -> bool:
        return len(self.cluster.devices) <= COMPLETE

    def lineups(self, seconds: Callable[[ReplicaSpec, int], float]) -> Iterator[Strategy]:
        """All sets of replicas, each once, without order and micro-batches.

        `seconds`: time of replicas of one type for their share of the rows, in so many micro-batches.
        """
        found = self._every() if self.is_small else self._in_a_row(seconds)
        for strategy in dict.fromkeys(found):
            if self._is_asked_for(strategy):
                yield from (Strategy(strategy.replicas, near=near) for near in self._rules(strategy))

    def data_parallel(self) -> Iterator[Strategy]:
        """Replicas of one device: on all devices, each type, each host that looks unlike the others, and one device of each type."""
        one = {kind: ReplicaSpec((RankSpec(kind),), count) for kind, count in self.counts.items()}
        found = [Strategy(tuple(one.values()), near=True), *(Strategy((own,), near=True) for own in one.values())]
        for host in {look: host for host, look in zip(self.cluster.hosts, host_looks(self.cluster).values(), strict=True)}.values():
            found.append(Strategy(tuple(replace(one[device.kind], count=1, names=((device.name,),)) for device in host.devices)))
        found += [Strategy((replace(own, count=1),), near=True) for own in one.values()]
        yield from filter(self._is_asked_for, dict.fromkeys(found))

    def spread(self) -> Iterator[Strategy]:
        """Few devices as one split group that no host has: of several hosts, of several types, or of another number.

        Each alone, and beside a copy of the model on every other device.
        """
        if not self.is_small or self.freedom.near is not None:
            return
        seen, devices = set[object](), self.cluster.devices
        for number in range(2, len(devices) + 1):
            for group in combinations(devices, number):
                if number in self.widths[group[0].kind] and len({(own.kind, own.host) for own in group}) == 1:
                    continue
                others = tuple(ReplicaSpec((RankSpec(own.kind),), names=((own.name,),)) for own in devices if own not in group)
                split = ReplicaSpec((RankSpec.of(group),), names=(tuple(own.name for own in group),))
                for replicas in dict.fromkeys(((split,), (split, *others))):
                    look = self._look([own.names or () for own in replicas])
                    if look not in seen:
                        seen.add(look)
                        yield from filter(self._is_asked_for, [Strategy(replicas)])

    def turns(self, strategy: Strategy) -> tuple[Sequence[Order], Sequence[int]]:
        """The distinct orders of a set of replicas, and numbers of micro-batches; with one rank only the first order."""
        deepest = strategy.deepest.num_ranks
        orders = [order for order in self.freedom.orders[: 1 if deepest == 1 else None] if deepest * order.num_chunks <= self.num_places]
        return orders, self.micro_batches(self.num_rows // strategy.num_replicas)

    def micro_batches(self, most: int) -> Sequence[int]:
        fixed = self.freedom.micro_batches
        if fixed is None:
            return micro_batch_counts(self.num_rows, most)
        return (fixed,) if fixed <= most else ()

    def _rules(self, strategy: Strategy) -> tuple[bool | None, ...]:
        """The rules by which unnamed devices are placed: `Places`."""
        if strategy.replicas[0].names is not None:
            return (None,)
        if self.freedom.near is not None:
            return (self.freedom.near,)
        is_one_way = all(each.count == 1 or max(each.numbers.values()) == 1 for each in strategy.replicas)
        return (True,) if is_one_way or strategy.taken.keys() <= self._on_one_host else (True, False)

    @cached_property
    def _on_one_host(self) -> frozenset[Device]:
        """The types whose devices are all on one host, where they can be exchanged."""
        return frozenset(kind for kind, numbers in self._on_hosts.items() if len(numbers) == 1)

    @property
    def _num_ranks(self) -> int | None:
        """Of each replica, where set; with more stages than devices, consecutive stages share one."""
        return None if self.freedom.num_ranks is None else min(self.freedom.num_ranks, len(self.cluster.devices))

    def _is_allowed(self, strategy: Strategy) -> bool:
        own = strategy.unnamed.replicas
        deep = all(each.num_ranks <= self.num_places and self._num_ranks in (None, each.num_ranks) for each in own)
        return deep and (not self.freedom.alike or (len(own) == 1 and (not own[0].is_split or own[0].count == 1)))

    def _is_asked_for(self, strategy: Strategy) -> bool:
        return self._is_allowed(strategy) and (self.freedom.using is None or strategy.taken.get(self.freedom.using, 0) > 0)

    def _every(self) -> Iterator[Strategy]:
        """All replicas on all choices of devices, one per class of equivalent devices and hosts."""
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
        """All ways to make split groups of neighbours in each row, of one type on one host."""
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
        """Equal for replicas on equivalent devices."""
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
        """Per device a number that devices of one type and price share."""
        known: dict[object, int] = {}
        return {device.name: known.setdefault((device.kind, device.price_per_hour), len(known)) for device in self.cluster.devices}

    def _in_a_row(self, seconds: Callable[[ReplicaSpec, int], float]) -> Iterator[Strategy]:
        """Replicas of one type each, separately and combined; and replicas over several types, in runs of identical devices."""
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
        """Numbers of replicas of one type that leave devices out: those of one host, and any where fewer may be the best."""
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
        """How many split groups of a width fit on the hosts."""
        return sum(number // width for number in self._on_hosts[kind])

    @cached_property
    def _on_hosts(self) -> Mapping[Device, tuple[int, ...]]:
        """Per device type, its number on each host that has it."""
        found: dict[Device, list[int]] = {}
        for host in self.cluster.hosts:
            for kind, number in Counter(device.kind for device in host.devices).items():
                found.setdefault(kind, []).append(number)
        return {kind: tuple(numbers) for kind, numbers in found.items()}

    def _depths(self, room: int) -> Sequence[int]:
        """Ranks per replica: 1, 2, 4 ..., and what each of 1, 2, 4 ... replicas would have."""
        most = min(room, self.num_places)
        if self._num_ranks is not None:
            return (self._num_ranks,) if self._num_ranks <= most else ()
        return sorted({*powers_of_two(most), *(min(room // count, most) for count in powers_of_two(room))})

    def _forms(self, kind: Device, seconds: Callable[[ReplicaSpec, int], float]) -> Sequence[ReplicaSpec]:
        """The replicas of one type that are fastest for their share of the rows, and plain copies of the model."""
        allowed = [replica for replica in self._of_one_kind(kind) if self._is_allowed(Strategy((replica,)))]
        plain = [replica for replica in allowed if replica.num_devices == replica.count]
        others = [replica for replica in allowed if replica not in plain]

        def least(replica: ReplicaSpec) -> float:
            return min(seconds(replica, count) for count in self.micro_batches(self.num_rows // replica.count) or (1,))

        return [*plain, *sorted(others, key=least)[: FORMS - len(plain)]]

    def _of_kinds(self, kinds: tuple[Device, ...]) -> Iterator[ReplicaSpec]:
        """As many replicas over all of these types as there are devices for; of two types each may have its own width."""
        for widths in product(*(self.widths[kind] for kind in kinds)):
            if len(kinds) > PAIR and len(set(widths)) > 1:
                continue
            ranks = tuple(map(RankSpec, kinds, widths))  # one for all ranks of a kind: it is hashed and compared soonest
            rooms = [self._room(kind, width) for kind, width in zip(kinds, widths, strict=True)]
            for depths in self._divisions(rooms):
                count = min(room // depth for room, depth in zip(rooms, depths, strict=True))
                yield ReplicaSpec(tuple(rank for rank, depth in zip(ranks, depths, strict=True) for _ in range(depth)), count)

    def _divisions(self, rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Ranks of each type in a replica, for each sensible number of replicas, and the deepest."""
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
    """All ways to put some of the devices in rows; rows are ordered by their first device."""
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
    """Ways to divide a total over several types, some of each: in proportion to what there is first, then with the most of each one."""
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
    """Per host, a value that is equal for equivalent hosts."""

    def look(host: Host) -> object:
        prices = tuple(device.price_per_hour for device in host.devices), host.price_per_hour
        return tuple(device.kind for device in host.devices), prices, host.link, host.card, host.name if cluster.pairs else ""

    return {host.name: look(host) for host in cluster.hosts}


def micro_batch_counts(num_rows: int, most: int) -> tuple[int, ...]:
    """Numbers of micro-batches up to `most`: powers of two, and between each two the divisor of the rows nearest the middle."""
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
