"""What the estimate of a step is worth where its devices and its model were measured: eight plans of a GPT on 2 and 4 CPU ranks.

    python examples/benchmarks/prediction.py --json prediction.json

data_parallel    a copy of the model on either of 2 ranks
uneven           the same, planned as if the second rank were three times slower: its rows are a quarter
pipeline_1f1b    two stages, four micro-batches
pipeline_gpipe   the same, all forward passes first
split            every layer divided over both ranks
data_parallel_4  a copy of the model on each of 4 ranks
nested           two pipelines of two stages, on 4 ranks
split_pairs      two groups of two ranks, which divide every layer

First the ranks do what `whale probe` and `whale profile` do: they measure themselves, the messages between them, the ops of the
model and its passes on one rank. Then each plan is estimated from these figures (`whale.estimate`), and run for some steps.
Nothing is fitted to the steps. Error = (predicted - measured) / measured, of the median step. The rank correlation (Spearman's)
says how far the order of the plans is right, which is what a planner needs of it.

The machine may be busy with other things, and slower in one moment than in another, by core. The plans take turns, step by step, so
that a slow moment hits all of them; and after each round the passes of the model are timed again, by which the steps of the round
are set to the moment in which the model was profiled (`drift`, its median printed beside; 1 on a quiet machine; --raw leaves it out).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

import whale
from whale.comm import World
from whale.estimate import Costs, estimate
from whale.estimate.costs.measured import measured
from whale.ir.cluster import Cluster
from whale.ir.figure import Figure
from whale.ir.profile import KindProfile, Profile
from whale.measure.op_times import Inputs, time_passes
from whale.measure.samples import RoundTimer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, loss_fn
from measuring import measure
from ranks import on_ranks, slowest, timed

SLOWER = 3.0
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
    "data_parallel_4": Case(4),
    "nested": Case(4, stages=2, schedule="1f1b"),
    "split_pairs": Case(4, split=2),
}


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
        object.__setattr__(self, "error", (self.predicted - self.measured) / self.measured)


@dataclass(frozen=True)
class Found:
    """What some ranks have found.

    Attributes:
        figures: of themselves and of the model's passes.
        drift: seconds of the model's passes on the slowest rank, while the plans ran / when it was profiled; a median.
        results: by plan.
    """

    figures: tuple[Figure, ...]
    drift: float
    results: dict[str, Result]


@dataclass
class Running:
    """A plan at work."""

    engine: whale.Engine
    predicted: float
    seconds: list[float] = field(default_factory=list)


def run_plans(num_ranks: int, options: argparse.Namespace) -> Found:
    """The figures of so many ranks, and the results of the plans for them; each of these ranks calls it."""
    batch = make_batch(options)
    own = measure(make_model(options), batch, loss_fn, options.rounds)
    cluster, profile = own.cluster, own.profile
    cases = {name: CASES[name] for name in options.only or CASES if CASES[name].num_ranks == num_ranks}
    running = {name: start(case, cluster, profile, batch, options) for name, case in cases.items()}
    passes = [(*kind.forward, *kind.backward) for kind in profile.kinds]
    usual, drifts = max(map(whole_pass, profile.kinds)), list[float]()
    for number in range(options.warmup + options.steps):
        for each in running.values():
            seconds = slowest(timed(partial(each.engine.step, batch)))
            if number >= options.warmup:
                each.seconds.append(seconds)
        if number >= options.warmup:
            drifts.append(1.0 if options.raw else slowest(pass_seconds(own.world, own.inputs, own.graph.num_rows)) / usual)
    results = {name: result(each, drifts, num_ranks) for name, each in running.items()}
    return Found((*cluster.measured, *chain.from_iterable(passes)), statistics.median(drifts), results)


def start(case: Case, cluster: Cluster, profile: Profile, batch: dict[str, torch.Tensor], options: argparse.Namespace) -> Running:
    """Plans, estimates, and makes the engine."""
    pipeline = {"pipeline.schedule": case.schedule, "pipeline.num_micro_batch": options.micro_batches}
    config = whale.Config({"planning.search": "off", **(pipeline if case.schedule else {})})
    model = make_model(options, case)
    planned_for = slowed(cluster, case.slower)
    engine = whale.parallelize(model, loss=loss_fn, optimizer=OPTIMIZER, batch=batch, config=config, cluster=planned_for)
    costs = replace(Costs.of(config), measured=measured(profile, engine.model_graph, cluster))
    return Running(engine, estimate(engine.plan, engine.model_graph, cluster, costs).step_seconds)


def result(running: Running, drifts: Sequence[float], num_ranks: int) -> Result:
    """The two times of a plan, whose ranks then end; each step is divided by the drift of its round."""
    seconds = sorted(each / drift for each, drift in zip(running.seconds, drifts, strict=True))
    plan = str(running.engine.plan).partition("\n")[0]
    running.engine.close()
    return Result(num_ranks, running.predicted, statistics.median(seconds), seconds[0], seconds[-1], plan)


def make_model(options: argparse.Namespace, case: Case | None = None) -> GPT:
    """The model, with the scopes of a case."""
    torch.manual_seed(0)
    return GPT(options.layers, options.width, 4, options.context, case.stages if case else 0, case.split if case else 1)


def make_batch(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random bytes."""
    text = torch.randint(256, (options.rows, options.context + 1), generator=torch.Generator().manual_seed(1))
    return {"ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with its last device so many times slower."""
    (host,) = cluster.hosts
    last = host.devices[-1]
    flops = tuple((dtype, peak / factor) for dtype, peak in last.flops)
    slow = replace(last, flops=flops, bandwidth=last.bandwidth / factor, kernel_start=(last.kernel_start or 0.0) * factor)
    return replace(cluster, hosts=(replace(host, devices=(*host.devices[:-1], slow)),), measured=())


def whole_pass(kind: KindProfile) -> float:
    """Seconds of both passes at most rows, as profiled."""
    return sum(figures[-1].value for figures in (kind.forward, kind.backward) if figures)


def pass_seconds(world: World, inputs: Inputs, num_rows: int) -> float:
    """Seconds of the model's forward and backward pass on this rank, while all compute one."""
    return statistics.median(time_passes(RoundTimer(world, 1), inputs, num_rows).both)


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
    for num_ranks, each in found.items():
        print(f"{num_ranks} ranks; drift {each.drift:.2f}")
        for figure in each.figures:
            print(f"  {figure}")
    results = {name: result for each in found.values() for name, result in each.results.items()}
    print(f"{'plan':<16}{'ranks':>6}{'predicted ms':>14}{'measured ms':>13}{'error':>8}   steps from - to ms")
    for name, result in results.items():
        times = f"{1e3 * result.predicted:>14.1f}{1e3 * result.measured:>13.1f}{result.error:>+8.0%}"
        print(f"{name:<16}{result.num_ranks:>6}{times}   {1e3 * result.fastest:.1f} - {1e3 * result.slowest:.1f}")
    both = [(round(each.predicted, 6), round(each.measured, 6)) for each in results.values()]  # seconds; equal to a microsecond is equal
    correlation = rank_correlation(*zip(*both, strict=True))
    mean = statistics.mean(abs(result.error) for result in results.values())
    load = os.getloadavg()[0]
    print(f"mean error {mean:.1%}; rank correlation {correlation:.2f}; load {load:.1f}")
    if file is not None:
        ranks = {num_ranks: {"drift": each.drift, "figures": [asdict(one) for one in each.figures]} for num_ranks, each in found.items()}
        plans = {name: asdict(result) for name, result in results.items()}
        summary = {"mean_error": mean, "rank_correlation": correlation, "load": load}
        file.write_text(json.dumps({"ranks": ranks, "plans": plans, **summary}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"steps": 9, "warmup": 2, "rounds": 5, "layers": 4, "width": 256, "context": 64, "rows": 16, "micro-batches": 4}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--only", action="append", choices=CASES, help="one plan only; repeatable")
    parser.add_argument("--raw", action="store_true", help="leave measured times as they are, whatever the machine did meanwhile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    sizes = sorted({CASES[name].num_ranks for name in options.only or CASES})
    report({num_ranks: on_ranks(num_ranks, run_plans, num_ranks, options) for num_ranks in sizes}, options.json)


if __name__ == "__main__":
    main()
