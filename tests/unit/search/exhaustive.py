"""Every strategy on the devices of a small cluster, by their names, without classes or symmetry: the plain way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, permutations, product

from whale.config import Config
from whale.errors import WhaleError
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import place_sizes
from whale.planning.cutting.cuts import Cuts
from whale.planning.pipeline.placement import DevicePool
from whale.planning.plan import EstimatedPlan, plan_as_set
from whale.planning.realizing import Realizer
from whale.planning.shard.stage_price import StagePricing
from whale.planning.strategy import Placed, RankSpec, ReplicaSpec, Strategy
from whale.search.form import ClosedForms
from whale.search.freedom import ORDERS, Order, freedom_of
from whale.search.objective import Objective
from whale.search.ranking import FreeSpace
from whale.search.space import micro_batch_counts, powers_of_two


def least(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    num_rows: int,
    judge: Callable[[EstimatedPlan], float],
    policies: Sequence[str] = ("auto",),
) -> float | None:
    """The least that `judge` says of any plan; None where there is none.

    Args:
        policies: of recomputation, each tried with every plan.
    """
    seater = seater_of(graph, cluster, config, num_rows)
    found = list[float]()
    for strategy, policy in product(every_strategy(cluster, num_rows), policies):
        with contextlib.suppress(WhaleError):
            found.append(judge(seater.realize(recomputing(strategy, policy))))
    return min(found, default=None)


def seater_of(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> Realizer:
    return Realizer(Prices(graph, cluster, Costs.for_model(config, graph, cluster)), config, num_rows)


def space_of(graph: ModelGraph, cluster: Cluster, rows: int) -> FreeSpace:
    seater, freedom = seater_of(graph, cluster, Config(), rows), freedom_of(Config(), mixes_samples=False)
    return FreeSpace(ClosedForms(seater), freedom, Objective("step_time", cluster, rows))


def every_strategy(cluster: Cluster, num_rows: int) -> Iterator[Strategy]:
    """All strategies: replicas in the cluster's order, with equal numbers of micro-batches and one order."""
    names = [device.name for device in cluster.devices]
    for replicas in replicas_of(names):
        for placed in all_grouped(replicas, cluster):
            for num_micro_batch in micro_batch_counts(num_rows, num_rows // len(placed)):
                deepest = max(map(len, placed))
                for order in ORDERS[: 1 if deepest == 1 else None]:
                    yield Strategy(tuple(replica_of(own, cluster, order if len(own) > 1 else ORDERS[0], num_micro_batch) for own in placed))


def replica_of(placed: Placed, cluster: Cluster, order: Order, num_micro_batch: int) -> ReplicaSpec:
    """A replica on these devices of each rank."""
    ranks = tuple(RankSpec(cluster.by_name[names[0]].kind, len(names)) for names in placed)
    own = ReplicaSpec(ranks, names=placed, schedule=order.schedule, num_chunks=order.num_chunks)
    return replace(own, num_micro_batch=num_micro_batch)


def recomputing(strategy: Strategy, policy: str) -> Strategy:
    return replace(strategy, replicas=tuple(replace(replica, recompute=policy) for replica in strategy.replicas))


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


def every_plan_divided(graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int) -> Iterator[tuple[Strategy, float]]:
    """All plans around the scopes of a graph, with the seconds of a step."""
    freedom = freedom_of(config, mixes_samples=False)
    prices = Prices(graph, cluster, Costs.for_model(config, graph, cluster))
    for devices, placed, order, num_micro_batch in every_division(graph, cluster, config, num_rows):
        own = freedom.config.with_values(of_order(order) | {"pipeline.num_micro_batch": num_micro_batch})
        with contextlib.suppress(WhaleError):
            pool = DevicePool(cluster, cluster.only(devices), stated=placed)
            seconds = plan_as_set(StagePricing.of(prices, own.communication.overlap), own, Cuts(prices, num_rows), pool).plan.step_seconds
            replicas = (
                ReplicaSpec(names=own, schedule=order.schedule, num_chunks=order.num_chunks, num_micro_batch=num_micro_batch)
                for own in placed
            )
            yield Strategy(tuple(replicas), tuple(cluster.by_name[name] for name in devices)), seconds


def every_division(
    graph: ModelGraph, cluster: Cluster, config: Config, num_rows: int
) -> Iterator[tuple[tuple[str, ...], tuple[Placed, ...], Order, int]]:
    """Devices that may be taken, those of each rank of each replica, orders, and numbers of micro-batches."""
    names = [device.name for device in cluster.devices]
    asked = sizes_of(graph, config, len(names), ORDERS[0])
    for number, order, num_micro_batch in product(range(1, len(names) + 1), ORDERS, micro_batch_counts(num_rows, num_rows)):
        plain = len(asked) == 1
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
