"""How long a plan takes on large mixed clusters: a transformer of 96 layers on 128, 256 and 1,024 devices of three kinds.

    python examples/benchmarks/planning.py --json planning.json

stages      8 stages, their number given, without scopes: the planner cuts the model
recompute   the same with four times the rows, and as much recomputation as each device's memory demands
dealt       as `stages`, but each replica gets like devices from many hosts, so that no two replicas lie on the same hosts
wide        8 scopes of 12 layers, each replicated over an eighth of all devices: one replica of the model, over all hosts
split       8 scopes of 12 layers, each split over 4 devices: the planner finds the axes and the sizes
nested      the same scopes under one more, that replicates them: one replica of the model, in which every stage has many groups

Devices stand in hosts of 8. Of 8 hosts 2 have A100-40GB, 2 V100-32GB, 2 T4, one has 4 A100 and 4 V100, one 5 V100 and 3 T4.

Seconds are of this process's CPU time (`time.process_time`), so that another load on the machine counts little; they hold for
one core. The model is captured, on the meta device, before the clock starts. `planning` is all of `make_plan`, its final check
(`verify`) included; `verify`, `text` and `json` are of calls of their own, and so is `start_up`: what a rank in the
middle works out of a plan before it makes its programs (axes, holdings, schedules, buckets, groups, lanes, its own regions). How
the planning falls to its passes is told by a second, profiled run: shares of its time, which a profiler distorts somewhat; what
one pass calls of another counts in both.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

import whale
from whale.axes import discover
from whale.capture import capture
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.serialization import to_json
from whale.planning import make_plan
from whale.planning.annotations.taskgraphs import read_scopes
from whale.planning.cutting.partition import cut_into_stages
from whale.planning.pipeline.cut_points import find_cut_points
from whale.planning.pipeline.placement import placements
from whale.planning.pipeline.recompute import Chooser
from whale.planning.replicas.end_of_step import end_of_step
from whale.planning.replicas.replica import make_replica, model_replica
from whale.planning.shard.overlapping import Overlapper
from whale.planning.shard.scattering import scatter_all
from whale.planning.shard.sharding import Sharder
from whale.planning.structure.structure import analyse
from whale.planning.verify import verify
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.schedules import alike_schedules, schedules_of
from whale.sharding.buckets import plan_buckets
from whale.sharding.communicators import communicators_of

T = TypeVar("T")
Scope = AbstractContextManager[object]

LAYERS = 96
NUM_STAGES = 8
GROUP = 4
ROWS_PER_DEVICE = 4
SIZES = (128, 256, 1024)

PASSES: dict[str, Callable[..., object]] = {
    "scopes": read_scopes,
    "structure": analyse,
    "cut points": find_cut_points,
    "axes": discover,
    "placement": placements,
    "partition": cut_into_stages,
    "recompute": Chooser.choose,
    "models of replicas": model_replica,
    "sharding": Sharder.choose,
    "overlapping": Overlapper.choose,
    "end of step": end_of_step,
    "replicas of the plan": make_replica,
    "scattering": scatter_all,
    "verify": verify,
}


@dataclass(frozen=True)
class Scopes:
    """What the model is made under.

    Attributes:
        stage: makes the scope of one eighth of the layers, from its name.
        all: makes the scope around everything.
    """

    stage: Callable[[str], Scope] = lambda name: nullcontext()
    all: Callable[[], Scope] = nullcontext


@dataclass(frozen=True)
class Case:
    """One way to plan the model.

    Attributes:
        settings: of the configuration.
        scopes: those around each eighth of the layers, and around all, for a number of devices.
        rows_per_device: of the global batch.
    """

    settings: dict[str, object]
    scopes: Callable[[int], Scopes] | None = None
    rows_per_device: int = ROWS_PER_DEVICE


BATCHES: dict[str, object] = {"pipeline.num_micro_batch": NUM_STAGES}
STAGES = BATCHES | {"pipeline.num_stages": NUM_STAGES}
CASES = {
    "stages": Case(STAGES),
    "recompute": Case(STAGES | {"recompute.policy": "auto"}, rows_per_device=4 * ROWS_PER_DEVICE),
    "dealt": Case(STAGES | {"cluster.device_place_prefer_intra_node": False}),
    "wide": Case(BATCHES, lambda num_devices: Scopes(lambda name: whale.replicate(num_devices // NUM_STAGES, name=name))),
    "split": Case(
        BATCHES,
        lambda num_devices: Scopes(lambda name: whale.split(GROUP, name=name)),
        rows_per_device=3,  # four do not fit on T4s beside their communicators
    ),
    "nested": Case(
        BATCHES,
        lambda num_devices: Scopes(
            lambda name: whale.split(GROUP, name=name), lambda: whale.replicate(num_devices // NUM_STAGES // GROUP, name="copies")
        ),
    ),
}


@dataclass(frozen=True)
class Result:
    """What planning took, in seconds of CPU time.

    Attributes:
        planning: the whole of `make_plan`.
        verify: the check of the finished plan, in a call of its own.
        text: the plan as text.
        json: the plan as JSON.
        start_up: what one rank works out of the plan before it makes its programs.
        passes: per pass its part of `planning`, by the shares of a profiled run.
        megabytes: the most that the process held so far.
        load: of the machine, over the last minute.
        plan: the plan's first line.
    """

    planning: float
    verify: float
    text: float
    json: float
    start_up: float
    passes: dict[str, float]
    megabytes: int
    load: float
    plan: str


class Block(nn.Module):
    """Attention and a feed-forward part, each with a norm before and dropout after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Tables(nn.Module):
    """Tokens and their places as vectors."""

    def __init__(self, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.tokens(ids) + self.positions.weight
        return vectors


class Transformer(nn.Module):
    """Token and position tables, blocks, a norm and a classifier.

    Args:
        scopes: under which each eighth of the layers is made.
    """

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, scopes: list[Scope]) -> None:
        super().__init__()
        with scopes[0]:
            self.tables = Tables(width, length, vocabulary)
        self.blocks = nn.ModuleList()
        for index in range(layers):
            with scopes[index * NUM_STAGES // layers]:
                self.blocks.append(Block(width, heads))
        with scopes[-1]:
            self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tables(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.classes(self.norm(x))
        return logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def transformer(layers: int, scopes: Scopes) -> ModelGraph:
    """The captured model: 2.8 billion parameters at 96 layers."""
    width, heads, length, vocabulary = 1536, 16, 512, 50304
    with torch.device("meta"), scopes.all():
        tokens = torch.zeros(2, length, dtype=torch.long)
        model = Transformer(layers, width, heads, length, vocabulary, [scopes.stage(f"layers{stage}") for stage in range(NUM_STAGES)])
        return capture(model, {"ids": tokens, "labels": tokens.clone()}, loss)[0]


def mixed_cluster(num_devices: int) -> Cluster:
    """Hosts of 8 devices of three kinds, as a cluster file has them."""
    eighth = num_devices // 64
    kinds = {"a": (2, "8 x A100-40GB"), "v": (2, "8 x V100-32GB"), "t": (2, "8 x T4")}
    kinds |= {"av": (1, "[4 x A100-40GB, 4 x V100-32GB]"), "vt": (1, "[5 x V100-32GB, 3 x T4]")}
    lines = [f"  - {{name: {name}-, count: {count * eighth}, devices: {devices}}}" for name, (count, devices) in kinds.items()]
    return parse_cluster("\n".join((f"name: mixed-{num_devices}", "hosts:", *lines, "network: {bandwidth: 50 Gbit/s, latency: 20 us}")))


def measure(case: Case, graph: ModelGraph, num_devices: int, *, by_pass: bool) -> Result:
    """Plans once by the clock, and once more under the profiler."""
    cluster, config = mixed_cluster(num_devices), whale.Config(case.settings)

    def planned() -> Plan:
        return make_plan(graph, cluster, config, rows=num_devices * case.rows_per_device)

    planning, plan = timed(planned)
    return Result(
        planning=planning,
        verify=timed(lambda: verify(plan, graph, cluster))[0],
        text=timed(lambda: str(plan))[0],
        json=timed(lambda: to_json(plan))[0],
        start_up=timed(lambda: start_up(plan, graph, config))[0],
        passes=profiled(planned, planning) if by_pass else {},
        megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        load=round(os.getloadavg()[0], 1),
        plan=str(plan).partition("\n")[0],
    )


def start_up(plan: Plan, graph: ModelGraph, config: whale.Config) -> None:
    """What `parallelize` works out on the rank in the middle once it has the plan."""
    rank = len(plan.devices) // 2
    holdings = Holdings.of(plan, graph, discover_if_sharded(plan, graph))
    schedules = schedules_of(plan)
    plan_buckets(plan, holdings.shardings, graph, alike_schedules(plan), config.communication.bucket_bytes)
    communicators_of(plan, graph, holdings.shardings, schedules, len(plan.devices))
    for name in (name for name, owners in plan.owners.items() if rank in owners):
        holdings.held(name, rank)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds of CPU time of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def profiled(call: Callable[[], object], seconds: float) -> dict[str, float]:
    """Per pass, its part of these seconds."""
    profile = cProfile.Profile()
    profile.runcall(call)
    stats = pstats.Stats(profile)
    code = {name: (each.__code__.co_filename, each.__code__.co_firstlineno, each.__name__) for name, each in PASSES.items()}
    found = {name: stats.stats[key][3] for name, key in code.items() if key in stats.stats}  # type: ignore[attr-defined]
    return {name: round(seconds * own / stats.total_tt, 3) for name, own in found.items()}  # type: ignore[attr-defined]


def show(name: str, num_devices: int, result: Result) -> None:
    others = f"verify {result.verify:.2f}, text {result.text:.2f}, JSON {result.json:.2f}, start-up {result.start_up:.2f}"
    print(f"{name:<10} {num_devices:>5} devices: planning {result.planning:.2f} s, {others}; {result.megabytes} MB; load {result.load}")
    print(f"    {result.plan}")
    if result.passes:
        print("    " + ", ".join(f"{own} {seconds:.2f}" for own, seconds in sorted(result.passes.items(), key=lambda each: -each[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="one case only; repeatable")
    parser.add_argument("--devices", type=int, action="append", help="one size of cluster only, a multiple of 64; repeatable")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model, a multiple of 8")
    parser.add_argument("--totals", action="store_true", help="without the second, profiled run")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    plain: ModelGraph | None = None
    results: dict[str, dict[str, object]] = {}
    for name in arguments.case or CASES:
        case = CASES[name]
        for num_devices in arguments.devices or SIZES:
            if case.scopes is None:
                graph = plain = plain or transformer(arguments.layers, Scopes())
            else:
                graph = transformer(arguments.layers, case.scopes(num_devices))
            result = measure(case, graph, num_devices, by_pass=not arguments.totals)
            show(name, num_devices, result)
            results[f"{name} {num_devices}"] = asdict(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
