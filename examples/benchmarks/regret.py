"""What a search with its usual effort gives away: its plan beside the best of every plan of its space, over random cases.

    python examples/benchmarks/regret.py --cases 500 --json regret.json
    python examples/benchmarks/regret.py --first 120 --cases 1 --devices 4

A case is drawn by its number, and so drawn again by it: up to 4 devices on any hosts, some rows, and a model. Half of the models are GPTs
of any size, from a few words to 400,000, on devices and links of the catalogue; half are ops of any cost, wired at random, on devices and
links of any speed (`tests/unit/search/many.py`). The regret is how much slower the found plan is than the best one, by the same estimate.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests, whose random models and clusters this uses

from tests.unit.search.many import drawn_cluster, drawn_graph
from whale.config import Config
from whale.errors import WhaleError
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.search import SearchResult, search
from whale.workloads import GPT

NUM_DEVICES = (2, 2, 3, 3, 4)
"""Of the clusters; as often as they stand here."""
KINDS = ("A100-80GB", "A100-40GB", "V100-32GB", "V100-16GB", "T4", "P100", "3090")
NETWORKS = ("ethernet-10g", "ethernet-25g", "ethernet-50g", "ethernet-100g", "infiniband-hdr")


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
    """A GPT of one to four blocks."""
    return GPT(
        layers=draw.randint(1, 4),
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


def drawn_case(number: int, num_devices: int | None = None) -> tuple[str, str, ModelGraph, Cluster, int]:
    """Model and cluster in short, as values, and the rows."""
    draw = random.Random(number)
    devices = draw.choice(NUM_DEVICES) if num_devices is None else num_devices
    if number % 2:
        return "ops", f"{devices} devices", drawn_graph(draw, scoped=False), drawn_cluster(draw, devices), draw.randint(1, 9)
    model, text = drawn_gpt(draw), drawn_hosts(draw, devices)
    return str(model), text.replace("\n", ", "), model.graph(), parse_cluster(text), draw.choice((4, 8, 16))


def searched(graph: ModelGraph, cluster: Cluster, rows: int, effort: float | None) -> SearchResult | None:
    try:
        return search(graph, cluster, Config(), rows=rows, effort=effort)
    except WhaleError:
        return None


def outcome(number: int, num_devices: int | None = None) -> Outcome:
    """One case."""
    model, hosts, graph, cluster, rows = drawn_case(number, num_devices)
    start = time.process_time()
    found = searched(graph, cluster, rows, None)
    cpu_seconds = time.process_time() - start
    best = searched(graph, cluster, rows, math.inf)
    regret = math.inf
    if best is None or found is not None:
        regret = 0.0 if found is None or best is None else found.value / best.value - 1
    return Outcome(
        number,
        model,
        hosts,
        rows,
        regret,
        "" if found is None else str(found),
        "" if best is None else str(best),
        0 if found is None else found.num_planned,
        0 if best is None else best.num_planned,
        cpu_seconds,
    )


def summary(outcomes: list[Outcome]) -> str:
    """Mean and worst regret of the cases that have a plan."""
    regrets = [each.regret for each in outcomes if each.best]
    missed, known = sum(map(math.isinf, regrets)), [each for each in regrets if math.isfinite(each)]
    within = sum(each <= 0.005 for each in known)
    return (
        f"{len(outcomes)} cases, {len(regrets)} with a plan, {missed} of these not found; regret {statistics.fmean(known or [0.0]):.2%} in "
        f"the mean, {max(known, default=0.0):.1%} at worst, {within} within 0.5 %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the first case (default: %(default)s)")
    parser.add_argument("--step", type=int, default=1, help="from a case to the next: 2 for one half of the models (default: %(default)s)")
    parser.add_argument("--devices", type=int, choices=sorted(set(NUM_DEVICES)), help="of each cluster (default: drawn)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes here")
    options = parser.parse_args()
    outcomes = list[Outcome]()
    for place in range(options.cases):
        own = outcome(options.first + place * options.step, options.devices)
        outcomes.append(own)
        if own.regret > 0.005:
            print(
                f"case {own.number}: {own.regret:+.2%}, {own.model}, {own.cluster}, {own.rows} rows: {own.found}, best: {own.best}",
                flush=True,
            )
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    print(summary(outcomes))


if __name__ == "__main__":
    main()
