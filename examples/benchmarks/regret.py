"""What a search with its usual effort gives away: its plan beside the best of all plans of small clusters, over random cases.

    python examples/benchmarks/regret.py --cases 60 --json regret.json
    python examples/benchmarks/regret.py --memory --cases 25
    python examples/benchmarks/regret.py --first 120 --cases 1 --devices 4 --most 20000

A case is drawn by its number, and so drawn again by it: 2 or 3 devices, or as many as asked, on any hosts, some rows, and a model. Half of
the models are GPTs of any size, from a few words to 400,000, on devices and links of the catalogue; half are ops of any cost, wired at
random, on devices and links of any speed (`tests/unit/search/many.py`). With --memory each device type has 0.6 to 1.2 of the memory that
its fullest device needs in the plan that is found without limits.

All plans: written down here, without the space of the search, its closed forms and its bounds. Every part of the devices, in every division
into replicas, every order of each pipeline, every split of neighbours; every schedule with 1 to 4 chunks; powers of two and divisors of the
rows as numbers of micro-batches, one for all replicas; what memory demands computed again, nothing, or all blocks. Devices that can be
exchanged are tried once. Where there are more than --most of them, all without pipelines are tried, and so many others, which are drawn;
then, from the best, all that differ from it in order and micro-batches, or in devices, until none of these is faster. The regret is how
much slower the found plan is than the best one, by the same estimate.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests, whose random models and clusters this uses

from tests.unit.search.many import drawn_cluster, drawn_graph
from whale.config import Config
from whale.errors import WhaleError
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.planning.plan import EstimatedPlan
from whale.planning.realizing import Realizer
from whale.planning.strategy import Placed, RankSpec, ReplicaSpec, Strategy
from whale.progress import without_collecting
from whale.schedules import BUILDERS
from whale.search import SearchResult, search
from whale.workloads import GPT

NUM_DEVICES = (2, 3)
"""Of the clusters, in turn."""
MOST = 200
"""Strategies with pipelines that are tried whatever the first ones give: all of two devices."""
KINDS = ("A100-80GB", "A100-40GB", "V100-32GB", "V100-16GB", "T4", "P100", "3090")
NETWORKS = ("ethernet-10g", "ethernet-25g", "ethernet-50g", "ethernet-100g", "infiniband-hdr")
MOST_CHUNKS = 4
"""Of schedules that have any number."""
UNLIMITED = 2**50
"""Bytes that are enough for all plans."""
NEARLY_FULL = 0.9
"""Share of a memory up to which a plan that computes nothing again is taken as the one that memory does not touch."""


@dataclass(frozen=True)
class Outcome:
    """What one case came to.

    Attributes:
        number: of the case.
        model, cluster: in short.
        rows: of the global batch.
        regret: how much slower the found plan is than the best, as a share of the best; infinite where only the latter is found.
        found, best: the strategies; empty where there is none.
        num_planned: plans that the search made.
        num_plans: plans that were made for all.
        cpu_seconds: of the search.
    """

    number: int
    model: str
    cluster: str
    rows: int
    regret: float
    found: str
    best: str
    num_planned: int
    num_plans: int
    cpu_seconds: float


def drawn_gpt(draw: random.Random) -> GPT:
    """A GPT of one or two blocks."""
    return GPT(
        layers=draw.randint(1, 2),
        hidden=draw.choice((128, 256, 512, 1024)),
        heads=draw.choice((4, 8)),
        sequence=draw.choice((8, 32, 128, 512)),
        vocabulary=draw.choice((1_000, 30_000, 100_000, 400_000)),
        tied=draw.random() < 0.5,
    )


def drawn_hosts(draw: random.Random, num_devices: int) -> str:
    """Hosts of devices of the catalogue, as a cluster file has them."""
    kinds, hosts, left = draw.sample(KINDS, draw.randint(1, 2)), list[str](), num_devices
    while left:
        own = draw.randint(1, left)
        hosts.append(f"{{name: h{len(hosts)}, devices: {own} x {draw.choice(kinds)}}}")
        left -= own
    return f"hosts: [{', '.join(hosts)}]\nnetwork: {draw.choice(NETWORKS)}"


def drawn_case(number: int, devices: int) -> tuple[str, str, ModelGraph, Cluster, int]:
    """Model and cluster in short, as values, and the rows."""
    draw = random.Random(number)
    if number % 2:
        return "ops", f"{devices} devices", drawn_graph(draw, scoped=False), drawn_cluster(draw, devices), draw.randint(1, 9)
    model, text = drawn_gpt(draw), drawn_hosts(draw, devices)
    return str(model), text.replace("\n", ", "), model.graph(), parse_cluster(text), draw.choice((4, 8, 16))


def with_memory(cluster: Cluster, memory: dict[Device, int]) -> Cluster:
    """The cluster whose devices have this memory, by their type."""
    return replace(
        cluster,
        hosts=tuple(replace(host, devices=tuple(replace(own, memory=memory[own.kind]) for own in host.devices)) for host in cluster.hosts),
    )


def scarce(number: int, graph: ModelGraph, cluster: Cluster, rows: int) -> Cluster:
    """The cluster with 0.6 to 1.2 of the memory that the plan found without limits needs on its fullest device of each type."""
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    best = search(graph, with_memory(cluster, dict.fromkeys(kinds, UNLIMITED)), Config(), rows=rows).step
    draw, fullest = random.Random(number), max(each.peak.total for each in best.devices)
    needed = dict[Device, float]()
    for each in best.devices:
        for name in each.devices:
            kind = cluster.by_name[name].kind
            needed[kind] = max(needed.get(kind, 0.0), each.peak.total)
    fraction = Config().memory.fraction
    return with_memory(cluster, {kind: int(draw.uniform(0.6, 1.2) * needed.get(kind, fullest) / fraction) for kind in kinds})


Way = tuple[tuple[Placed, ...], tuple[str, int], int]
"""The replicas of a plan, their schedule with its chunks, and their micro-batches."""


@dataclass(eq=False)
class Every:
    """All plans of a case, or many; the best one so far.

    Attributes:
        num_plans: that were made and fit.
        best: strategy and seconds of the best.
    """

    graph: ModelGraph
    cluster: Cluster
    rows: int
    num_plans: int = 0
    best: tuple[str, float] = ("", math.inf)

    def look(self, number: int, most: int) -> None:
        """Makes all plans, or those without pipelines, so many others that are drawn, and from the best of these what is near it.

        `number`: of the case, by which they are drawn.
        """
        config = Config({"recompute.policy": "auto"})
        realizer = Realizer(Prices(self.graph, self.cluster, Costs.for_model(config, self.graph, self.cluster)), config, self.rows)
        ways = list(self.ways())
        flat, deep = ([way for way in ways if (max(map(len, way[0])) > 1) == is_deep] for is_deep in (False, True))
        drawn = deep if len(ways) <= most else random.Random(number).sample(deep, min(most, len(deep)))
        known = {way: self._fastest(realizer, way) for way in (*flat, *drawn)}
        while len(known) < len(ways) and min(known.values()) < math.inf:
            placed, *turn = min(known, key=known.__getitem__)
            near = [way for way in ways if way not in known and (way[0] == placed or list(way[1:]) == turn)]
            if not near:
                return
            known |= {way: self._fastest(realizer, way) for way in near}

    def ways(self) -> Iterator[Way]:
        """Whatever can be chosen but for what is computed again."""
        for placed in every_placement(self.cluster):
            most = max(map(len, placed))
            for order, count in product(orders() if most > 1 else [("1f1b", 1)], counts(self.rows, self.rows // len(placed))):
                yield placed, order, count

    def _fastest(self, realizer: Realizer, way: Way) -> float:
        """Seconds of the fastest plan that fits, by what is computed again; infinite where none does."""
        placed, (schedule, chunks), count = way
        policy, least = "full" if schedule in ("recompute_early", "last_no_recompute", "shifted_critical_path") else "auto", math.inf
        strategy = Strategy(tuple(_replica(own, self.cluster, schedule, chunks, count, policy) for own in placed))
        is_plain = policy == "full"
        with suppress(WhaleError):
            found = realizer.realize(strategy)
            least, is_plain = self._taken(strategy, found), is_plain or _is_plain(found)
        for other in () if is_plain else ("none", "blocks"):
            own = Strategy(tuple(replace(replica, recompute=other) for replica in strategy.replicas))
            with suppress(WhaleError):
                least = min(least, self._taken(own, realizer.realize(own)))
        return least

    def _taken(self, strategy: Strategy, found: EstimatedPlan) -> float:
        self.num_plans += 1
        seconds = math.inf if found.not_joined else found.plan.step_seconds
        if seconds < self.best[1]:
            self.best = said(strategy), seconds
        return seconds


def _is_plain(found: EstimatedPlan) -> bool:
    """Whether it computes nothing again, with memory to spare: so would the other policies, or do more."""
    stages = (stage for replica in found.plan.replicas for stage in replica.stages)
    is_full = any(each.peak.total > NEARLY_FULL * each.capacity for each in found.step.devices)
    return not is_full and not any(segment.recompute for stage in stages for segment in stage.program)


def _replica(placed: Placed, cluster: Cluster, schedule: str, chunks: int, count: int, policy: str) -> ReplicaSpec:
    ranks = tuple(RankSpec(cluster.by_name[names[0]].kind, len(names)) for names in placed)
    order = (schedule, chunks) if len(placed) > 1 else ("1f1b", 1)
    return ReplicaSpec(ranks, 1, placed, *order, count, policy)


@cache
def orders() -> tuple[tuple[str, int], ...]:
    """Every schedule with its chunks; interleaving one chunk is 1F1B."""
    found = list[tuple[str, int]]()
    for name, builder in BUILDERS.items():
        found += [(name, builder.chunks)] if builder.chunks is not None else [(name, chunks) for chunks in range(2, MOST_CHUNKS + 1)]
    return tuple(found)


def counts(rows: int, most: int) -> list[int]:
    """Powers of two and divisors of the rows."""
    return [count for count in range(1, most + 1) if rows % count == 0 or count & (count - 1) == 0]


def every_placement(cluster: Cluster) -> Iterator[tuple[Placed, ...]]:
    """All replicas on some of the devices, of one for each set that exchanging equivalent devices makes equal."""
    names = [device.name for device in cluster.devices]
    same, seen = exchanges(cluster), set[object]()
    for number in range(1, len(names) + 1):
        for row in permutations(names, number):
            for groups in compositions(row):
                for replicas in compositions(groups):
                    look = min(_look(replicas, exchange) for exchange in same)
                    if look not in seen:
                        seen.add(look)
                        yield replicas


def _look(replicas: tuple[Placed, ...], exchange: dict[str, str]) -> tuple[object, ...]:
    """Equal for replicas in any order, and for devices in any order within a group."""
    return tuple(sorted(tuple(tuple(sorted(exchange[name] for name in group)) for group in replica) for replica in replicas))


def compositions(row: Sequence[Any]) -> Iterator[Any]:
    """All ways to cut a row into parts."""
    if not row:
        yield ()
    for size in range(1, len(row) + 1):
        yield from ((tuple(row[:size]), *others) for others in compositions(row[size:]))


def exchanges(cluster: Cluster) -> list[dict[str, str]]:
    """The ways to rename the devices after which all is as before."""
    devices = cluster.devices

    def look(device: Device) -> object:
        host = cluster.host_by_name[device.host]
        return device.kind, device.price_per_hour, host.link, host.card, host.price_per_hour

    found = []
    for other in permutations(devices):
        pairs = list(zip(devices, other, strict=True))
        if all(look(a) == look(b) for a, b in pairs) and all(
            cluster.link(a.name, b.name) == cluster.link(c.name, d.name) and (a.host == b.host) == (c.host == d.host)
            for a, c in pairs
            for b, d in pairs
            if a != b
        ):
            found.append({a.name: b.name for a, b in pairs})
    return found


def searched(graph: ModelGraph, cluster: Cluster, rows: int) -> SearchResult | None:
    try:
        return search(graph, cluster, Config({"memory.zero": "0"}), rows=rows)  # as those that are written down
    except WhaleError:
        return None


@without_collecting()
def outcome(number: int, num_devices: int, *, is_scarce: bool = False, most: int = MOST) -> Outcome:
    """One case.

    Args:
        number: of the case.
        num_devices: of its cluster.
        is_scarce: whether memory binds.
        most: strategies that are tried whatever the first ones give.
    """
    model, hosts, graph, cluster, rows = drawn_case(number, num_devices)
    if is_scarce:
        cluster = scarce(number, graph, cluster, rows)
    start = time.process_time()
    found = searched(graph, cluster, rows)
    cpu_seconds = time.process_time() - start
    every = Every(graph, cluster, rows)
    every.look(number, most)
    best, seconds = every.best
    if found is not None and (own := found.plan.step_seconds) < seconds:
        assert most < len(list(every.ways())), "what the search finds is among all plans"
        best, seconds = str(found), own
    return Outcome(
        number,
        model,
        hosts,
        rows,
        0.0 if not best else math.inf if found is None else found.plan.step_seconds / seconds - 1,
        "" if found is None else str(found),
        best and f"{best}: {1e3 * seconds:.4g} ms",
        0 if found is None else found.num_planned,
        every.num_plans,
        cpu_seconds,
    )


def said(strategy: Strategy) -> str:
    """A strategy with the names of its devices."""
    places = " | ".join(" -> ".join("+".join(names) for names in replica.names or ()) for replica in strategy.replicas)
    return f"{strategy}, recompute {strategy.replicas[0].recompute}, on {places}"


def summary(outcomes: list[Outcome]) -> str:
    """Mean and worst regret of the cases that have a plan."""
    regrets = [each.regret for each in outcomes if each.best]
    missed, known = sum(map(math.isinf, regrets)), [each for each in regrets if math.isfinite(each)]
    within = sum(each <= 0.005 for each in known)
    plans = [each.num_plans for each in outcomes if each.best]
    return (
        f"{len(outcomes)} cases, {len(regrets)} with a plan, {missed} of these not found; {min(plans, default=0):,} to "
        f"{max(plans, default=0):,} plans each, {sum(plans):,} in all; regret {statistics.fmean(known or [0.0]):.2%} in "
        f"the mean, {max(known, default=0.0):.1%} at worst, {within} within 0.5 %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=30, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the first case (default: %(default)s)")
    parser.add_argument("--step", type=int, default=1, help="from a case to the next: 2 for one half of the models (default: %(default)s)")
    parser.add_argument("--devices", type=int, nargs="+", default=NUM_DEVICES, metavar="N", help="of clusters, in turn (default: 2 3)")
    parser.add_argument(
        "--most", type=int, default=MOST, metavar="N", help="pipelines that are tried whatever comes (default: %(default)s)"
    )
    parser.add_argument("--memory", action="store_true", help="devices with 0.6 to 1.2 of what the plan without limits needs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes here")
    options = parser.parse_args()
    outcomes = list[Outcome]()
    for place in range(options.cases):
        number = options.first + place * options.step
        devices = options.devices[number // 2 % len(options.devices)]  # the models take turns too
        own = outcome(number, devices, is_scarce=options.memory, most=options.most)
        outcomes.append(own)
        if abs(own.regret) > 0.005:
            print(
                f"case {own.number}: {own.regret:+.2%}, {own.model}, {own.cluster}, {own.rows} rows: {own.found}, best: {own.best}",
                flush=True,
            )
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    print(summary(outcomes))


if __name__ == "__main__":
    main()
