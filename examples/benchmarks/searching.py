"""How long the search for a plan takes: the clusters of docs/results.md, and how it grows.

    python examples/benchmarks/searching.py --json searching.json
    python examples/benchmarks/searching.py --growth

Seconds are CPU time of this process (`time.process_time`), from the graph to the verified plan. The models are GPTs, captured on the meta
device before the clock starts; nothing runs. `rule` is the step without a search, copies of the model on all devices. `--growth` goes from
one case, 96 devices of three kinds in 12 hosts and 24 layers, to more devices, layers and kinds. `--only TEXT` takes the cases with this in
their name, `--profile FILE` writes a profile of their searches.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from whale.config import Config
from whale.errors import WhaleError
from whale.hardware import parse_cluster
from whale.planning import make_plan
from whale.search.searching import search
from whale.units import format_seconds
from whale.workloads import GPT

SMALL = GPT(layers=12, hidden=768, heads=12, sequence=512, vocabulary=30_000)
DEEP = GPT(layers=100, hidden=1536, heads=16, sequence=512, vocabulary=50_304)
LARGEST = GPT(layers=128, hidden=25_600, heads=160, sequence=2048, vocabulary=51_200, dtype="float16")

KINDS = ("A100-80GB", "V100-32GB", "T4", "A100-40GB", "P100")
"""Of the growing clusters, in the order in which they come in."""


@dataclass(frozen=True)
class Case:
    """A search.

    Attributes:
        name: of the cluster, as the page has it.
        hosts: of the cluster, as a cluster file has them.
        network: between them.
        model: that is divided.
        rows: of the global batch.
    """

    name: str
    hosts: str
    network: str
    model: GPT
    rows: int


UNLIKE_HOSTS = """
  - {name: a-, count: 32, devices: 8 x A100-40GB}
  - {name: v-, count: 32, devices: 8 x V100-32GB}
  - {name: t-, count: 32, devices: 8 x T4}
  - {name: av-, count: 16, devices: [4 x A100-40GB, 4 x V100-32GB]}
  - {name: vt-, count: 16, devices: [5 x V100-32GB, 3 x T4]}"""

CASES = (
    Case("2 V100 and 2 T4", "[{name: v, devices: 2 x V100-32GB}, {name: t, devices: 2 x T4}]", "ethernet-25g", SMALL, 32),
    Case(
        "A100, V100 and 2 T4",
        "[{name: a, devices: 1 x A100-80GB}, {name: v, devices: 1 x V100-32GB}, {name: t, devices: 2 x T4}]",
        "ethernet-25g",
        SMALL,
        32,
    ),
    Case("8 A100 and 8 T4", "[{name: new, devices: 8 x A100-80GB}, {name: old, devices: 8 x T4}]", "ethernet-10g", SMALL, 128),
    Case("36 T4 in 9 hosts", "[{name: t, count: 9, devices: 4 x T4}]", "ethernet-25g", SMALL, 288),
    Case("1,024 devices of 3 kinds", UNLIKE_HOSTS, "ethernet-50g", DEEP, 4096),
    Case("3,072 A100", "[{name: a, count: 384, devices: 8 x A100-80GB}]", "infiniband-hdr", LARGEST, 3072),
)


MIDDLE = (12, 24, 3)
"""Hosts, layers and kinds of the case from which the others grow."""


def growing(num_hosts: int, layers: int, num_kinds: int) -> Case:
    """Hosts of 8 devices, about as many of each kind."""
    numbers = [(num_hosts + num_kinds - 1 - index) // num_kinds for index in range(num_kinds)]
    hosts = ", ".join(
        f"{{name: k{index}-, count: {number}, devices: 8 x {KINDS[index]}}}" for index, number in enumerate(numbers) if number
    )
    name = f"{8 * num_hosts} devices, {layers} layers, {num_kinds} kind{'s' * (num_kinds > 1)}"
    return Case(name, f"[{hosts}]", "ethernet-50g", replace(DEEP, layers=layers), 32 * num_hosts)


def growth() -> Iterator[Case]:
    """One middle case, and from it in three directions."""
    hosts, layers, kinds = MIDDLE
    yield from (growing(num_hosts, layers, kinds) for num_hosts in (3, 6, 12, 24, 48, 96))
    yield from (growing(hosts, num_layers, kinds) for num_layers in (12, 48, 96, 192))
    yield from (growing(hosts, layers, num_kinds) for num_kinds in (1, 2, 4, 5))


@dataclass(frozen=True)
class Result:
    """What a search took and found.

    Attributes:
        cpu_seconds: of the search.
        num_planned: plans that were made.
        step_seconds: of the plan that it found.
        rule_seconds: of copies of the model on all devices; None where they do not fit, or were not asked for.
        plan: that it found, in a line.
        load: of the machine, over the last minute.
    """

    cpu_seconds: float
    num_planned: int
    step_seconds: float
    rule_seconds: float | None
    plan: str
    load: float

    def row(self, *, with_rule: bool) -> str:
        """Of the table of the page, after the name of the case."""
        rule = "does not fit" if self.rule_seconds is None else format_seconds(self.rule_seconds)
        times = (format_seconds(self.step_seconds), *([rule] if with_rule else []))
        return " | ".join((f"{self.cpu_seconds:.1f} s", str(self.num_planned), *times, self.plan))


def measure(case: Case, profile: cProfile.Profile | None, *, with_rule: bool) -> Result:
    """One search by the clock."""
    cluster = parse_cluster(f"hosts: {case.hosts}\nnetwork: {case.network}")
    graph = case.model.graph()
    start = time.process_time()
    if profile is None:
        found = search(graph, cluster, Config(), rows=case.rows)
    else:
        found = profile.runcall(search, graph, cluster, Config(), rows=case.rows)
    cpu_seconds = time.process_time() - start
    rule: float | None = None
    if with_rule:
        try:
            rule = make_plan(graph, cluster, Config(), rows=case.rows).step_seconds
        except WhaleError:
            rule = None  # it does not fit
    return Result(cpu_seconds, found.num_planned, found.step.step_seconds, rule, str(found.strategy), round(os.getloadavg()[0], 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true", help="how the search grows with devices, layers and kinds")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases with this in their name; repeatable")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile the searches, and write what `pstats` reads here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    profile = None if options.profile is None else cProfile.Profile()
    results: dict[str, Result] = {}
    for case in growth() if options.growth else CASES:
        if options.only is None or any(each in case.name for each in options.only):
            results[case.name] = measure(case, profile, with_rule=not options.growth)
            print(f"| {case.name} | {case.rows:,} | {results[case.name].row(with_rule=not options.growth)} |", flush=True)
    if profile is not None:
        profile.dump_stats(options.profile)
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
