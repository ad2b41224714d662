"""Random cases for as long as is asked: what the search finds with as much effort as it may need, beside every plan of its space.

    python -m tests.unit.search.many --devices 2 --minutes 10 --json many.json
    python -m tests.unit.search.many --devices 3 --first 1000 --scoped

The tests beside this file draw the same laws from fewer blocks, a few cases each. Here speeds, memories, links, widths and costs of ops are
any numbers between limits, models are wired at random, and each case has a number, by which it is drawn again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.unit.planning.graphs import Graph, device, scope
from tests.unit.search.exhaustive import every_strategy, least_divided, recomputing, seater_of
from whale.config import Config
from whale.errors import WhaleError
from whale.ir.cluster import Cluster, Handling, Host, Link
from whale.ir.graph import ModelGraph
from whale.planning.strategy import Strategy
from whale.search import search
from whale.search.freedom import freedom_of

CLOSE = 1e-9
"""Two times that differ by a smaller part are the same."""


@dataclass(frozen=True)
class Outcome:
    """What one case came to.

    Attributes:
        number: of the case.
        num_plans: that there are; 0 where nothing fits.
        difference: how much slower than the fastest plan the search's is, as a part; infinite where only the latter is found.
        fastest: the strategy of the fastest plan, by its shape alone; empty where it is not known.
    """

    number: int
    num_plans: int
    difference: float = 0.0
    fastest: str = ""


def drawn_graph(draw: random.Random, *, scoped: bool) -> ModelGraph:
    """Ops of any cost, wired at random: chains, skips, towers, inputs that come in late, weights that are shared."""
    graph = Graph()
    width = draw.choice((4, 12, 16, 64))
    values = [graph.input("x", width)]
    if draw.random() < 0.3:
        values.append(graph.input("y", width))
    num_layers = draw.randint(4 if scoped else 1, 5)
    counts = draw.choice(((1, 1), (1, 1, 1), (1, 1, 1, 1), (1,), (None,), (2,), (1, 2))) if scoped else ()
    shared = draw.random() < 0.2
    straight, work = draw.random() < 0.5, 10 ** draw.uniform(0, 4)  # what an op computes, beside what is sent of it
    for index in range(num_layers):
        if counts:
            number = index * len(counts) // num_layers
            graph.path = (scope(number, counts[number], f"part{number}"),)
        source = values[-1] if straight else draw.choice(values[-3:])
        if index and not straight and draw.random() < 0.5:
            source = graph.call(f"sum{index}", "aten.add.Tensor", source, draw.choice(values), width=width, tags=["pointwise"])
        weight = graph.parameter("shared" if shared and index in (0, num_layers - 1) else f"layer{index}.weight", width, width)
        flops = int(8 * width * width * work * draw.choice((1.0, 1.0, draw.uniform(0.2, 5))))
        value = graph.call(f"layer{index}", "aten.linear.default", source, weight, width=width, flops=flops)
        if draw.random() < 0.3:
            value = graph.call(f"act{index}", "aten.gelu.default", value, width=width, tags=["pointwise"])
        values.append(value)
    graph.path = ()
    loose = [value for value in values[1:-1] if all(value not in op.inputs for op in graph.ops)]
    last = values[-1]
    for index, value in enumerate(loose):
        last = graph.call(f"joined{index}", "aten.add.Tensor", last, value, width=width, tags=["pointwise"])
    graph.sum_loss(last)
    return graph.build()


def drawn_cluster(draw: random.Random, num_devices: int) -> Cluster:
    """Devices of a few kinds on one host or several, whose links are any, own or shared, and may take time of the devices."""

    def link() -> Link:
        return Link(10 ** draw.uniform(6, 10), 10 ** draw.uniform(-6, -4), shared=draw.random() < 0.3)

    kinds = [(10 ** draw.uniform(9, 10.3), draw.choice((6_000, 20_000, 10 ** draw.uniform(3.5, 5), 2**30))) for _ in range(3)]
    handling = Handling(10 ** draw.uniform(-6, -4), 10 ** draw.uniform(-10, -8)) if draw.random() < 0.2 else None
    hosts, left = list[Host](), num_devices
    while left:
        own, name = draw.randint(1, left), f"h{len(hosts)}"
        made = tuple(
            device(f"{name}/{index}", name, flops, int(memory)) for index, (flops, memory) in enumerate(draw.choices(kinds, k=own))
        )
        if handling:
            made = tuple(replace(each, handling=handling) for each in made)
        hosts.append(Host(name, made, link(), card=10 ** draw.uniform(6, 9) if draw.random() < 0.2 else None))
        left -= own
    return Cluster("drawn", tuple(hosts), link() if len(hosts) > 1 else None)


def shape_of(strategy: Strategy) -> str:
    """Widths of the ranks of its replicas, and their order, where there is one."""
    replicas = sorted((replica.count, tuple(rank.width for rank in replica.ranks or ())) for replica in strategy.unnamed.replicas)
    shape = " + ".join(f"{count} x ({' -> '.join(map(str, widths))})" for count, widths in replicas)
    return f"{shape}, {strategy.deepest.schedule}" if any(len(widths) > 1 for _, widths in replicas) else shape


def free_case(number: int, num_devices: int) -> Outcome:
    """A model without scopes: every replica on every choice of devices in every order."""
    draw = random.Random(number)
    graph, cluster, rows = drawn_graph(draw, scoped=False), drawn_cluster(draw, num_devices), draw.randint(1, 9)
    seater = seater_of(graph, cluster, freedom_of(Config(), mixes_samples=False).config, rows)
    num_plans, best, fastest = 0, math.inf, ""
    for strategy in every_strategy(cluster, rows):
        with contextlib.suppress(WhaleError):
            seconds = seater.realize(recomputing(strategy, "auto")).plan.step_seconds
            num_plans += 1
            if seconds < best:
                best, fastest = seconds, shape_of(strategy)
    return Outcome(number, num_plans, difference(found(graph, cluster, rows), best), fastest)


def scoped_case(number: int, num_devices: int) -> Outcome:
    """A model in scopes: every choice of devices for their ranks."""
    draw = random.Random(number)
    graph, cluster, rows = drawn_graph(draw, scoped=True), drawn_cluster(draw, num_devices), draw.randint(1, 9)
    best = least_divided(graph, cluster, Config(), rows)
    return Outcome(number, int(best is not None), difference(found(graph, cluster, rows), math.inf if best is None else best))


def found(graph: ModelGraph, cluster: Cluster, rows: int) -> float:
    """The step of the search's plan, with as much effort as it may need; infinite where there is none."""
    try:
        return search(graph, cluster, Config(), rows=rows, effort=math.inf).plan.step_seconds
    except WhaleError:
        return math.inf


def difference(ours: float, best: float) -> float:
    if math.isinf(ours) or math.isinf(best):
        return 0.0 if ours == best or math.isinf(best) else math.inf
    return max(ours / best - 1, 0.0) if abs(ours / best - 1) > CLOSE else 0.0


def cases(arguments: argparse.Namespace) -> Iterator[Outcome]:
    case, until = scoped_case if arguments.scoped else free_case, time.monotonic() + 60 * arguments.minutes
    number = arguments.first
    while time.monotonic() < until:
        yield case(number, arguments.devices)
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="of each cluster (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=1.0, help="after which no case begins (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the first case (default: %(default)s)")
    parser.add_argument("--scoped", action="store_true", help="models in scopes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes here")
    arguments = parser.parse_args()
    outcomes = list[Outcome]()
    for outcome in cases(arguments):
        outcomes.append(outcome)
        if outcome.difference:
            print(f"case {outcome.number}: {outcome.difference:+.3%} from the fastest plan")
    planned = [outcome for outcome in outcomes if outcome.num_plans]
    wrong = [outcome for outcome in outcomes if outcome.difference]
    print(
        f"{len(outcomes)} cases of {arguments.devices} devices from {arguments.first}, {len(planned)} with a plan, "
        f"{sum(outcome.num_plans for outcome in planned)} plans: {len(wrong)} wrong"
    )
    for shape, count in Counter(outcome.fastest for outcome in planned if outcome.fastest).most_common():
        print(f"{count:6} x fastest: {shape}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
