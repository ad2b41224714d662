"""Every way to seat a model on the devices of a small cluster, by their names, without classes or symmetry: the plain way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, permutations, product

from whale.config import Config
from whale.errors import WhaleError
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import place_sizes
from whale.planning.pipeline.placement import Placed, Seats
from whale.planning.plan import Draft, draft_as_set
from whale.planning.seating import Seater, Seating
from whale.search.arrangement import Order
from whale.search.front import Front
from whale.search.objective import LeastTime
from whale.search.sketch.columns import columns_of
from whale.search.sketch.links import Ties
from whale.search.sketch.pieces import pieces_of
from whale.search.sketch.sketch import Sketches
from whale.search.space.freedom import ORDERS, freedom_of
from whale.search.space.space import Space, micro_batch_counts, powers_of_two
from whale.search.space.ways import Way


def least(
    graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int, judge: Callable[[Draft], float], policies: Sequence[str] = ("auto",)
) -> float | None:
    """The least that `judge` says of any plan; None where there is none.

    Args:
        policies: of recomputation, each tried with every plan.
    """
    seater = seater_of(graph, cluster, config, num_rows)
    found = list[float]()
    for seatings, policy in product(every_seating(cluster, num_rows), policies):
        with contextlib.suppress(WhaleError):
            found.append(judge(seater.draft(seatings, policy)))
    return min(found, default=None)


def seater_of(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> Seater:
    return Seater(Prices(graph, cluster, Costs.for_model(config, graph, cluster)), config, num_rows)


def front_of(graph: ModelGraph, cluster: Cluster, rows: int) -> Front:
    seater, freedom = seater_of(graph, cluster, Config(), rows), freedom_of(Config(), mixes_samples=False)
    pieces = pieces_of(columns_of(seater.prices, seater.structure), seater.points)
    sketches = Sketches(seater.prices, pieces, Ties(seater.prices), rows, freedom.recomputes)
    return Front(Space(cluster, freedom, rows, seater.points.num_units), sketches, LeastTime())


def every_seating(cluster: Cluster, num_rows: int) -> Iterator[tuple[Seating, ...]]:
    """All seatings: replicas in the cluster's order, with equal numbers of micro-batches and one order."""
    names = [device.name for device in cluster.devices]
    for replicas in replicas_of(names):
        for placed in all_grouped(replicas, cluster):
            for num_micro_batch in micro_batch_counts(num_rows, num_rows // len(placed)):
                deepest = max(map(len, placed))
                for order in ORDERS[: 1 if deepest == 1 or num_micro_batch == 1 else None]:
                    yield tuple(
                        Seating(
                            (order if len(own) > 1 else ORDERS[0]).schedule,
                            (order if len(own) > 1 else ORDERS[0]).num_chunks,
                            num_micro_batch,
                            own,
                        )
                        for own in placed
                    )


def replicas_of(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to put some of the devices in rows; a row stands where its first device does."""
    if not names:
        return
    first, others = names[0], names[1:]
    yield from replicas_of(others)  # the first stays idle
    for size in range(len(others) + 1):
        for beside in permutations(others, size):
            rest = [name for name in others if name not in beside]
            for place in range(size + 1):
                own = (*beside[:place], first, *beside[place:])
                yield (own,)
                yield from ((own, *more) for more in replicas_of(rest))


def all_grouped(replicas: Sequence[tuple[str, ...]], cluster: Cluster) -> Iterator[tuple[Placed, ...]]:
    """All ways to make split groups of neighbours in each row: of one kind, as large as some host has them, each of any width."""
    if not replicas:
        yield ()
        return
    for own in grouped(replicas[0], cluster):
        for others in all_grouped(replicas[1:], cluster):
            yield (own, *others)


def grouped(row: Sequence[str], cluster: Cluster) -> Iterator[Placed]:
    if not row:
        yield ()
    for width in powers_of_two(len(row)):
        group, kinds = tuple(row[:width]), {cluster.by_name[name].kind for name in row[:width]}
        if len(kinds) == 1 and room(kinds, cluster) >= width:
            yield from ((group, *others) for others in grouped(row[width:], cluster))


def room(kinds: set[object], cluster: Cluster) -> int:
    return max(sum(device.kind in kinds for device in host.devices) for host in cluster.hosts)


def least_divided(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> float | None:
    """The fastest step of any plan around the scopes of a graph; None where there is none."""
    return min((seconds for _, seconds in every_plan_divided(graph, cluster, config, num_rows)), default=None)


def every_plan_divided(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> Iterator[tuple[Way, float]]:
    """All plans around the scopes of a graph, with the seconds of a step."""
    freedom = freedom_of(config, mixes_samples=False)
    prices = Prices(graph, cluster, Costs.for_model(config, graph, cluster))
    for devices, placed, order, num_micro_batch in every_division(graph, cluster, config, num_rows):
        own = freedom.config.with_values(of_order(order) | {"pipeline.num_micro_batch": num_micro_batch})
        with contextlib.suppress(WhaleError):
            seats = Seats(cluster, cluster.only(devices), stated=placed)
            seconds = draft_as_set(prices, own, num_rows, seats).plan.step_seconds
            yield Way((), devices, num_micro_batch, freedom.policies[0], order, placed), seconds


def every_division(
    graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int
) -> Iterator[tuple[tuple[str, ...], tuple[Placed, ...], Order, int]]:
    """Devices that may be taken, those of each rank of each replica, orders, and numbers of micro-batches."""
    names = [device.name for device in cluster.devices]
    asked = sizes_of(graph, config, len(names), ORDERS[0])
    for number, order, num_micro_batch in product(range(1, len(names) + 1), ORDERS, micro_batch_counts(num_rows, num_rows)):
        plain = len(asked) == 1 or num_micro_batch == 1
        if sizes_of(graph, config, number, ORDERS[0]) != asked or (order != ORDERS[0] and plain):
            continue
        if sizes_of(graph, config, number, order) == asked:
            for devices in combinations(names, number):
                for row in permutations(devices, number // sum(asked) * sum(asked)):
                    yield devices, tuple(ranks_of(row, asked)), order, num_micro_batch


def ranks_of(row: Sequence[str], sizes: Sequence[int]) -> Iterator[Placed]:
    """Replica after replica, and rank after rank."""
    given = iter(row)
    for _ in range(len(row) // sum(sizes)):
        yield tuple(tuple(islice(given, size)) for size in sizes)


def sizes_of(graph: ModelGraph, config: Config, num_devices: int, order: Order) -> tuple[int, ...] | None:
    with contextlib.suppress(WhaleError):
        return place_sizes(graph, config.with_values(of_order(order)), num_devices)
    return None


def of_order(order: Order) -> dict[str, object]:
    return {"pipeline.schedule": order.schedule, "pipeline.num_chunks": order.num_chunks}
