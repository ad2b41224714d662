"""What planning for unlike devices is predicted to bring: the searched plan beside even policies, on eight mixed clusters.

    python examples/benchmarks/gains.py --json gains.json
    python examples/benchmarks/gains.py --states --json states.json
    python examples/benchmarks/gains.py --copies
    python examples/benchmarks/gains.py --settings

equal batch    a copy of the model on every device, equal rows
equal layers   one pipeline over all devices, equally many blocks in each stage; the best number of micro-batches
one strategy   the same replicas, stages, split and micro-batches for all devices, equal rows, blocks and parts: the best of all of them

Everything is predicted by the same estimate; nothing runs. The even policies may use whichever devices where, as the planner places
them, and compute every block again where they do not fit otherwise. Gain = seconds of the policy / seconds of the searched plan.

With --states: a model of width 2,048 so deep that its weights, gradients and optimizer state take a share of all memory, searched with
all state where it is computed with (`memory.zero: 0`), and with state that may be shared out and kept on hosts (`auto`).

With --copies: a copy of the model on every device with its weights sharded (`memory.zero: 3`), over all of them (`memory.zero_within: all`)
and within each host (`host`), and the plans that are searched with either and with the choice left open.

With --settings: the searched plan in float32, with a half type per device (`precision.dtype: half`), with hosts that step on their own and
average every 64 steps (`communication.sync_steps: 64`), and with both. What these compute is not the same training.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from whale.config import Config
from whale.errors import WhaleError
from whale.hardware import load_cluster, parse_cluster
from whale.hardware.precision import compute_type
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning import even_shares, make_plan
from whale.search import decide
from whale.units import counted
from whale.workloads import GPT

MODEL = GPT(layers=16, hidden=1024, heads=16, sequence=512, vocabulary=32000)
ROWS = 64
FILES = Path(__file__).resolve().parents[2] / "strategies" / "clusters"

CLUSTERS: dict[str, str] = {
    "2 V100 + 2 T4, 25 Gbit/s": "v100_t4.yaml",
    "4 A100 + 4 RTX 3090, 10 to 25 Gbit/s": "a100_3090.yaml",
    "8 V100 + 8 P100, 50 Gbit/s": "v100_p100_16.yaml",
    "8 A100 + 8 T4, 10 Gbit/s": """
        hosts: [{name: new, devices: 8 x A100-80GB}, {name: old, devices: 8 x T4}]
        network: ethernet-10g""",
    "1 A100 + 1 V100 + 2 T4, 25 Gbit/s": """
        hosts: [{name: a, devices: 1 x A100-80GB}, {name: b, devices: 1 x V100-32GB}, {name: c, devices: 2 x T4}]
        network: ethernet-25g""",
    "4 V100 + 12 T4 on 4 hosts, 50 Gbit/s": """
        hosts: [{name: big, devices: 4 x V100-32GB}, {name: small, count: 3, devices: 4 x T4}]
        network: ethernet-50g""",
    "4 H100 + 8 A100, InfiniBand": """
        hosts: [{name: new, devices: 4 x H100}, {name: old, devices: 8 x A100-80GB}]
        network: infiniband-hdr""",
    "8 A100 of 80 and 8 of 40 GB, InfiniBand": """
        hosts: [{name: large, devices: 8 x A100-80GB}, {name: small, devices: 8 x A100-40GB}]
        network: infiniband-hdr""",
}


@dataclass(frozen=True)
class Gains:
    """One cluster, in seconds per step.

    Attributes:
        searched: of the plan that the search finds.
        equal_batch, equal_layers, one_strategy: of the even policies; None where nothing of the kind fits in memory.
        plan: the searched one, in a line.
        strategy: the best of the third policy.
        cpu_seconds: of the search.
    """

    searched: float
    equal_batch: float | None
    equal_layers: float | None
    one_strategy: float | None
    plan: str
    strategy: str
    cpu_seconds: float


Strategy = tuple[int, int, int, int]
"""Replicas, stages, devices of a split group, micro-batches."""


def strategies(cluster: Cluster, rows: int, blocks: int) -> Iterator[Strategy]:
    """Every way to treat all devices alike."""
    count, widest = len(cluster.devices), min(len(host.devices) for host in cluster.hosts)
    for width in (1, 2, 4, 8):
        if width > widest or count % width:
            continue
        for stages in (number for number in range(1, min(blocks, count // width) + 1) if count // width % number == 0):
            replicas = count // width // stages
            for micro_batches in (1,) if stages == 1 else (2, 4, 8, 16):
                if rows >= replicas * micro_batches:
                    yield replicas, stages, width, micro_batches


def even_seconds(graph: ModelGraph, cluster: Cluster, strategy: Strategy, rows: int) -> float | None:
    """The step of a strategy with equal shares, every block computed again where it does not fit otherwise; None where it never does."""
    replicas, stages, width, micro_batches = strategy
    written: dict[str, object] = {"replicas": replicas, "num_stages": stages, "num_micro_batch": micro_batches}
    written |= {"blocks": "even"} if stages > 1 else {}
    written |= {"split": width} if width > 1 else {}
    for recompute in ("none", "blocks"):
        config = Config({"plan": written | {"recompute": recompute}})
        try:
            plan = make_plan(graph, cluster, config, rows=rows)
        except WhaleError:
            continue
        even = even_shares(plan, graph, cluster, config)
        if even.step_seconds is not None and not even.reason:
            return even.step_seconds
    return None


def _said(num_replicas: int, num_stages: int, width: int, num_micro_batch: int) -> str:
    shape = f"{counted(num_replicas, 'replica')} of {counted(num_stages, 'stage')}"
    return f"{shape}, split over {width}, {counted(num_micro_batch, 'micro-batch')}"


def gains(cluster: Cluster, graph: ModelGraph, rows: int) -> Gains:
    """The searched plan and the even policies on one cluster."""
    begin = time.process_time()
    plan, step = decide(None, graph, cluster, Config(), rows=rows)
    cpu_seconds = time.process_time() - begin
    found = {each: even_seconds(graph, cluster, each, rows) for each in strategies(cluster, rows, MODEL.layers)}
    fitting = {each: seconds for each, seconds in found.items() if seconds is not None}
    layers = [seconds for (replicas, _, width, _), seconds in fitting.items() if replicas == width == 1]
    best = min(fitting, key=fitting.__getitem__, default=None)
    return Gains(
        searched=step.step_seconds,
        equal_batch=found.get((len(cluster.devices), 1, 1, 1)),
        equal_layers=min(layers, default=None),
        one_strategy=None if best is None else fitting[best],
        plan="; ".join(choice.decision for choice in plan.choices if choice.pass_name == "search") or str(plan).partition("\n")[0],
        strategy="" if best is None else _said(*best),
        cpu_seconds=cpu_seconds,
    )


def row(name: str, found: Gains) -> str:
    """A row of the table of the page."""
    policies = (found.equal_batch, found.equal_layers, found.one_strategy)
    times = (f"{1e3 * seconds:.0f} ms, **{seconds / found.searched:.2f}x**" if seconds else "does not fit" for seconds in policies)
    return " | ".join((f"| {name}", f"{1e3 * found.searched:.0f} ms: {found.plan}", *times, f"{found.strategy} |"))


@dataclass(frozen=True)
class StateGain:
    """A model that fills much of one cluster's memory.

    Attributes:
        layers: of the model.
        num_parameters: of it.
        without: seconds of the best plan whose state is where it is computed with; None where nothing fits.
        searched: with what may be shared out and kept on hosts; None likewise.
        plan_without, plan: what was found, in a line.
    """

    layers: int
    num_parameters: int
    without: float | None
    searched: float | None
    plan_without: str
    plan: str


def state_gain(cluster: Cluster, share: float, rows: int) -> StateGain:
    """What sharing out and offloading state brings for a model whose state, whole once, takes this share of all memory."""
    model = replace(MODEL, layers=2, hidden=2048)
    small, larger = (sum(each.spec.num_elements for each in replace(model, layers=layers).graph().parameters) for layers in (2, 3))
    usable = sum(device.memory for device in cluster.devices)
    layers = max(2, int((share * usable / 16 - small) / (larger - small)) + 2)  # weights, gradients and two moments, in float32
    graph = replace(model, layers=layers).graph()

    def searched(**memory: str) -> tuple[float | None, str]:
        try:
            plan, step = decide(None, graph, cluster, Config({f"memory.{key}": value for key, value in memory.items()}), rows=rows)
        except WhaleError:
            return None, "does not fit"
        said = [choice.decision for choice in plan.choices if choice.pass_name in ("memory", "search")]
        return step.step_seconds, "; ".join(dict.fromkeys(said))

    (without, plan_without), (found, plan) = searched(zero="0", offload="none"), searched(zero="auto", offload="auto")
    return StateGain(layers, sum(each.spec.num_elements for each in graph.parameters), without, found, plan_without, plan)


@dataclass(frozen=True)
class CopiesGain:
    """Sharded weights on one cluster, in seconds per step, by `memory.zero_within`; None where nothing fits."""

    copied: dict[str, float | None]  # a copy of the model on every device, rows by speed
    searched: dict[str, float | None]


def copies_gain(cluster: Cluster, graph: ModelGraph, rows: int) -> CopiesGain:
    """What a copy of the sharded weights on each host brings."""

    def seconds(within: str, search: str) -> float | None:
        config = Config({"memory.zero": "3", "memory.zero_within": within, "planning.search": search, "recompute.policy": "auto"})
        try:
            return decide(None, graph, cluster, config, rows=rows)[1].step_seconds
        except WhaleError:
            return None

    return CopiesGain(*({within: seconds(within, search) for within in ("all", "host", "auto")} for search in ("off", "auto")))


def copies_row(name: str, found: CopiesGain) -> str:
    """A row of the table of copies."""
    cells = [f"{1e3 * each:.0f} ms" if each else "does not fit" for own in (found.copied, found.searched) for each in own.values()]
    gains = (f"{own['all'] / own['auto']:.2f}x" if own["all"] and own["auto"] else "" for own in (found.copied, found.searched))
    return " | ".join((f"| {name}", *cells, *gains)) + " |"


@dataclass(frozen=True)
class SettingsGain:
    """The searched plan of one cluster by settings that change what is computed: seconds per step, None where it has no such plan."""

    seconds: dict[str, float | None]


def settings_gain(cluster: Cluster, rows: int) -> SettingsGain:
    """What half precision by device and rounds of local steps bring."""

    def searched(precision: str, sync_steps: int) -> float | None:
        config = Config({"precision.dtype": precision, "communication.sync_steps": sync_steps})
        try:
            graph = MODEL.graph(precision=compute_type(config, cluster))
            return decide(None, graph, cluster, config, rows=rows)[1].step_seconds
        except WhaleError:
            return None

    ways = {"float32": ("float32", 1), "half": ("half", 1), "rounds": ("float32", 64), "half, rounds": ("half", 64)}
    return SettingsGain({name: searched(*each) for name, each in ways.items()})


def settings_row(name: str, found: SettingsGain) -> str:
    """A row of the table of settings."""
    plain = found.seconds["float32"]
    cells = (
        "none" if each is None else f"{1e3 * each:.0f} ms" + ("" if plain is None or own == "float32" else f", {plain / each:.2f}x")
        for own, each in found.seconds.items()
    )
    return " | ".join((f"| {name}", *cells)) + " |"


def state_row(name: str, found: StateGain) -> str:
    """A row of the table of states."""
    sides = (
        f"{1e3 * seconds:.0f} ms: {plan}" if seconds else "does not fit"
        for seconds, plan in ((found.without, found.plan_without), (found.searched, found.plan))
    )
    gain = f"**{found.without / found.searched:.2f}x**" if found.without and found.searched else ""
    return " | ".join((f"| {name}", f"{found.layers} layers, {found.num_parameters / 1e9:.1f} G", *sides, f"{gain} |"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="clusters with this in their name; repeatable")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the global batch (default {ROWS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--states", action="store_true", help="state that is shared out and kept on hosts, beside state that is not")
    parser.add_argument("--copies", action="store_true", help="sharded weights within each host, beside weights sharded over all devices")
    parser.add_argument("--settings", action="store_true", help="half precision by device, and rounds of local steps")
    parser.add_argument("--share", type=float, default=0.5, help="with --states: of all memory that the state takes (default 0.5)")
    options = parser.parse_args()
    graph, results = MODEL.graph(), dict[str, Gains | StateGain | CopiesGain | SettingsGain]()
    for name, text in CLUSTERS.items():
        if options.only is not None and not any(each in name for each in options.only):
            continue
        cluster = load_cluster(FILES / text) if text.endswith(".yaml") else parse_cluster(text)
        if options.states:
            results[name] = gain = state_gain(cluster, options.share, options.rows)
            print(state_row(name, gain), flush=True)
        elif options.copies:
            results[name] = copies = copies_gain(cluster, graph, options.rows)
            print(copies_row(name, copies), flush=True)
        elif options.settings:
            results[name] = by_settings = settings_gain(cluster, options.rows)
            print(settings_row(name, by_settings), flush=True)
        else:
            results[name] = found = gains(cluster, graph, options.rows)
            print(row(name, found), flush=True)
    even = [each.one_strategy / each.searched for each in results.values() if isinstance(each, Gains) and each.one_strategy]
    if even:
        print(f"the least gain over one strategy for all: {min(even):.2f}x")
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(each) for name, each in results.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
