"""What the estimate of a step is worth: predicted beside measured time of six plans of a GPT on 2 and 4 CPU ranks.

    python examples/benchmarks/prediction.py --json prediction.json

data_parallel    a copy of the model on either rank
uneven           the same, planned as if the second rank were three times slower: its rows are a quarter
pipeline_1f1b    two stages, four micro-batches
pipeline_gpipe   the same, all forward passes first
split            every layer divided over both ranks
nested           two pipelines of two stages, on four ranks

First the ranks measure, all at once since they share the cores, what one rank reaches: matrix products of the model's sizes,
memory traffic of tensors beyond the caches, the start of a small op, and a message of Gloo between two ranks. These figures are
the cluster that each plan is estimated on (`whale.estimate`), before it is run for some steps. Nothing is fitted to the steps.
Error = (predicted - measured) / measured, of the median step. The rank correlation (Spearman's) says how far the order of the
plans is right, which is what a planner needs of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import whale
from whale.estimate import Costs, estimate
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.measure.host import host_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, loss_fn
from ranks import on_ranks

SLOWER = 3.0
SMALL_OPS = 1000
LARGE_MESSAGE = 1 << 23
"""Bytes: so many that the latency of a message counts little."""
BEYOND_CACHES = 1 << 24
"""Bytes of each of three tensors: what is measured is the memory, as `Device.bandwidth` means it."""
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)


@dataclass(frozen=True)
class Case:
    """A plan to ask for.

    Attributes:
        num_ranks: that it runs on.
        stages, split: scopes of the model, as `gpt.GPT` takes them.
        schedule: of its pipelines; without one the batch is not divided into micro-batches.
        slower: how many times slower the last device is said to be when the rows are divided.
    """

    num_ranks: int
    stages: int = 0
    split: int = 1
    schedule: str | None = None
    slower: float = 1.0


CASES = {
    "data_parallel": Case(2),
    "uneven": Case(2, slower=SLOWER),
    "pipeline_1f1b": Case(2, stages=2, schedule="1f1b"),
    "pipeline_gpipe": Case(2, stages=2, schedule="gpipe"),
    "split": Case(2, split=2),
    "nested": Case(4, stages=2, schedule="1f1b"),
}


@dataclass(frozen=True)
class Rank:
    """What one rank reaches while the others work too; the mean over the ranks.

    Attributes:
        flops: FLOP/s of a float32 matrix product.
        bandwidth: bytes per second that an addition of large tensors reads and writes.
        launch_seconds: of a small op in a graph that is differentiated.
        latency: seconds of a small message, one way.
        link_bandwidth: bytes per second of a large message, beyond the latency.
    """

    flops: float
    bandwidth: float
    launch_seconds: float
    latency: float
    link_bandwidth: float

    def cluster(self, num_ranks: int, slower: float = 1.0) -> Cluster:
        """One host of such ranks; the last one slower."""
        speeds = [1.0] * (num_ranks - 1) + [slower]
        memory = host_memory() // num_ranks
        devices = (
            Device(f"host/{index}", "host", "cpu", (("float32", self.flops / speed),), memory, self.bandwidth / speed)
            for index, speed in enumerate(speeds)
        )
        return Cluster("measured", (Host("host", tuple(devices), Link(self.link_bandwidth, self.latency)),), None)


@dataclass(frozen=True)
class Result:
    """A plan by both clocks.

    Attributes:
        num_ranks: that it ran on.
        predicted, measured: seconds per step; the measured one a median.
        fastest, slowest: of the steps measured.
        plan: its first line.
        error: (predicted - measured) / measured.
    """

    num_ranks: int
    predicted: float
    measured: float
    fastest: float
    slowest: float
    plan: str
    error: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", self.predicted / self.measured - 1)


Found = tuple[Rank, dict[str, Result]]


def measure_rank(options: argparse.Namespace) -> Rank:
    """Measures this rank among the others, at the sizes of the model: the rows of a micro-batch, its widest features."""
    tokens, width = max(1, options.rows // options.micro_batches) * options.context, options.width
    x, weight, small = torch.randn(tokens, width), torch.randn(width, 4 * width), torch.ones(1, requires_grad=True)
    long, other, total = torch.zeros(3, BEYOND_CACHES // 4)
    product = typical(partial(torch.mm, x, weight, out=torch.empty(tokens, 4 * width)), options.rounds)
    traffic = typical(partial(torch.add, long, other, out=total), options.rounds)
    launch = typical(lambda: add_often(small), options.rounds) / SMALL_OPS
    latency, large = (typical(partial(exchange, torch.zeros(size // 4)), options.rounds) / 2 for size in (4, LARGE_MESSAGE))
    found = torch.tensor([2 * x.numel() * 4 * width / product, 3 * BEYOND_CACHES / traffic, launch, latency, large])
    dist.all_reduce(found)
    flops, bandwidth, launch, latency, large = (found / dist.get_world_size()).tolist()
    return Rank(flops, bandwidth, launch, latency, (LARGE_MESSAGE - 4) / max(large - latency, 1e-9))


def add_often(small: Tensor) -> None:
    x = small
    for _ in range(SMALL_OPS):
        x = x + small


def exchange(tensor: Tensor) -> None:
    """There and back between this rank and its neighbour."""
    rank = dist.get_rank()
    first, second = (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send)
    first(tensor, rank ^ 1)
    second(tensor, rank ^ 1)


def typical(call: Callable[[], object], rounds: int) -> float:
    """Seconds of a call: the median over rounds, each of equally many calls on all ranks, from a common start."""
    repeats = 10
    return statistics.median(timed(call, repeats) for _ in range(rounds))


def timed(call: Callable[[], object], repeats: int = 1) -> float:
    """Seconds per call, from a common start on all ranks."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def run_case(case: Case, rank: Rank, options: argparse.Namespace) -> Result:
    """Plans, estimates, then trains some steps."""
    torch.manual_seed(0)
    model = GPT(options.layers, options.width, 4, options.context, case.stages, case.split)
    text = torch.randint(256, (options.rows, options.context + 1), generator=torch.Generator().manual_seed(1))
    batch = {"ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    pipeline = {"pipeline.schedule": case.schedule, "pipeline.num_micro_batch": options.micro_batches}
    config = whale.Config(pipeline if case.schedule else {})
    cluster = rank.cluster(case.num_ranks, case.slower)
    engine = whale.parallelize(model, loss=loss_fn, optimizer=OPTIMIZER, batch=batch, config=config, cluster=cluster)
    costs = replace(Costs.of(config), launch_seconds=rank.launch_seconds)
    predicted = estimate(engine.plan, engine.model_graph, rank.cluster(case.num_ranks), costs)
    for _ in range(options.warmup):
        engine.step(batch)
    seconds = sorted(slowest(timed(partial(engine.step, batch))) for _ in range(options.steps))
    plan = str(engine.plan).partition("\n")[0]
    engine.close()
    return Result(case.num_ranks, predicted.step_seconds, statistics.median(seconds), seconds[0], seconds[-1], plan)


def slowest(seconds: float) -> float:
    """The greatest of all ranks' seconds."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def run_plans(num_ranks: int, options: argparse.Namespace) -> Found:
    """The figures of a rank among so many, and the results of the plans for them; each of these ranks calls it."""
    rank = measure_rank(options)
    return rank, {name: run_case(CASES[name], rank, options) for name in options.only or CASES if CASES[name].num_ranks == num_ranks}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 where both order alike, -1 where they order in opposite ways; equal values share a rank.

    0 where either side has no order, all its values being equal.
    """
    if min(len(set(first)), len(set(second))) < 2:
        return 0.0
    ranks = ([sum((other < value) + (other <= value) for other in each) for value in each] for each in (first, second))
    return statistics.correlation(*ranks)


def report(found: dict[int, Found], file: Path | None) -> None:
    """Prints what was found, by numbers of ranks, and writes it to a file."""
    for num_ranks, (rank, _) in found.items():
        compute = f"{rank.flops / 1e9:.1f} GFLOP/s, {rank.bandwidth / 1e9:.1f} GB/s, {1e6 * rank.launch_seconds:.1f} us an op"
        print(f"{num_ranks} ranks: each {compute}; messages {1e6 * rank.latency:.0f} us, {rank.link_bandwidth / 1e9:.2f} GB/s")
    results = {name: result for _, each in found.values() for name, result in each.items()}
    print(f"{'plan':<16}{'ranks':>6}{'predicted ms':>14}{'measured ms':>13}{'error':>8}   steps from - to ms")
    for name, result in results.items():
        times = f"{1e3 * result.predicted:>14.1f}{1e3 * result.measured:>13.1f}{result.error:>+8.0%}"
        print(f"{name:<16}{result.num_ranks:>6}{times}   {1e3 * result.fastest:.1f} - {1e3 * result.slowest:.1f}")
    both = [(round(each.predicted, 6), round(each.measured, 6)) for each in results.values()]  # seconds; equal to a microsecond is equal
    correlation = rank_correlation(*zip(*both, strict=True))
    load = os.getloadavg()[0]
    print(f"rank correlation {correlation:.2f}; load {load:.1f}")
    if file is not None:
        ranks = {num_ranks: asdict(rank) for num_ranks, (rank, _) in found.items()}
        plans = {name: asdict(result) for name, result in results.items()}
        file.write_text(json.dumps({"ranks": ranks, "plans": plans, "rank_correlation": correlation, "load": load}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"steps": 11, "warmup": 2, "rounds": 11, "layers": 4, "width": 256, "context": 64, "rows": 16, "micro-batches": 4}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--only", action="append", choices=CASES, help="one plan only; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    sizes = sorted({CASES[name].num_ranks for name in options.only or CASES})
    report({num_ranks: on_ranks(num_ranks, run_plans, num_ranks, options) for num_ranks in sizes}, options.json)


if __name__ == "__main__":
    main()
