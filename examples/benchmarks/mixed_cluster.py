"""What balance brings on a mixed cluster in miniature: two ranks of this machine, slowed to shares of a core, in one run side by side.

    python examples/benchmarks/mixed_cluster.py --speeds 1.0 0.33 --json mixed.json

data_parallel  rows by speed, against DistributedDataParallel with equal batches
pipeline       a cut by speed, against an even cut of the same layers, both eager 1F1B
split          heads and features by speed, against equal sizes
searched       what the planner finds for the model without any scope, against the fastest of those above

Nothing tells the planner the shares: the ranks measure what they and the model on them reach, all at once (`whale probe`, `whale
profile`), and the plans are for what was measured. `--megabits` joins the ranks by links of that speed.
A bound beside the times: a rank's speed is the rows per second of the plain training step on that rank alone, while all ranks
compute (`alone.py`); the ideal of a step is its rows by the sum of the speeds, times (m + p - 1) / m of a pipeline's fill; efficiency
is ideal / measured, speedup even / ours. Blocks of steps of either side alternate, and the ranks alone come after each pair, so that a
slow moment of the machine hits all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale
from whale.ir.cluster import Cluster, Host
from whale.ir.plan import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from alone import Alone, work_of
from gpt import GPT, loss_fn
from measuring import measure
from ranks import on_ranks, pair_of, summary

Step = Callable[[], object]
Batch = dict[str, Tensor]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)
HEADS = 16
MOST_MEASURED = 16
"""Rows of the passes and ops that are measured: beyond them prices go on in a straight line."""


@dataclass(frozen=True)
class Result:
    """One comparison, in seconds per step.

    Attributes:
        ours_seconds, even_seconds: medians, of the plan that knows the speeds and of equal parts; of the search, of what it finds
            and of the fastest other plan.
        ideal_seconds: no communication, no bubble but the pipeline's fill, every rank busy at its own speed; a median too.
        efficiency: ideal / ours, the median over the pairs, each with what the ranks did alone just after it.
        speedup: even / ours, the median over pairs of blocks.
        rows_per_second: of each rank alone in its work, medians.
        plan: ours.
    """

    ours_seconds: float
    even_seconds: float
    ideal_seconds: float
    efficiency: float
    speedup: float
    rows_per_second: list[float]
    plan: str


def make_model(options: argparse.Namespace, stages: int = 0, split: int = 1) -> GPT:
    torch.manual_seed(0)
    return GPT(options.layers, options.width, HEADS, options.context, stages, split)


def make_batch(options: argparse.Namespace, rows: int) -> Batch:
    text = torch.randint(256, (rows, options.context + 1), generator=torch.Generator().manual_seed(1))
    return {"ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def whale_side(options: argparse.Namespace, cluster: Cluster, config: dict[str, object], **scopes: int) -> tuple[Step, Plan]:
    """A step under a plan for this cluster, and the plan."""
    batch = make_batch(options, options.rows)
    engine = whale.parallelize(
        make_model(options, **scopes), loss=loss_fn, optimizer=OPTIMIZER, batch=batch, config=config, cluster=cluster
    )
    return partial(engine.step, batch), engine.plan


def by_speed(options: argparse.Namespace, cluster: Cluster, config: dict[str, object], **scopes: int) -> tuple[Step, Plan]:
    """A step under a plan for what was measured of these devices and of the model on them."""
    return whale_side(options, cluster, {"cluster.profile": str(options.profile), **config}, **scopes)


def distributed_data_parallel(options: argparse.Namespace) -> Step:
    """Equal batches; where the ranks do not divide the rows, the first ones have one more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = {name: tensor.tensor_split(size)[rank] for name, tensor in make_batch(options, options.rows).items()}
    model = nn.parallel.DistributedDataParallel(make_model(options))
    optimizer = OPTIMIZER(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model(batch["ids"]), batch).backward()
        optimizer.step()

    return step


def even(cluster: Cluster) -> Cluster:
    """The same cluster, as if all its devices were like the first."""
    first = cluster.devices[0]

    def like_first(host: Host) -> Host:
        return replace(host, devices=tuple(replace(first, name=device.name, host=device.host) for device in host.devices))

    return replace(cluster, hosts=tuple(like_first(host) for host in cluster.hosts))


AS_SET: dict[str, object] = {"planning.search": "off"}


def data_parallel(options: argparse.Namespace, cluster: Cluster) -> tuple[Step, Plan, Step]:
    return *by_speed(options, cluster, AS_SET), distributed_data_parallel(options)


def pipeline(options: argparse.Namespace, cluster: Cluster) -> tuple[Step, Plan, Step]:
    config: dict[str, object] = {**AS_SET, "pipeline.num_micro_batch": options.micro_batches, "pipeline.schedule": "eager_1f1b"}
    size = dist.get_world_size()
    other, _ = whale_side(options, cluster, config, stages=size)
    return *by_speed(options, cluster, config | {"pipeline.num_stages": size}), other


def split(options: argparse.Namespace, cluster: Cluster) -> tuple[Step, Plan, Step]:
    size = dist.get_world_size()
    other, _ = whale_side(options, even(cluster), AS_SET, split=size)
    return *by_speed(options, cluster, AS_SET, split=size), other


CASES: dict[str, Callable[[argparse.Namespace, Cluster], tuple[Step, Plan, Step]]] = {
    "data_parallel": data_parallel,
    "pipeline": pipeline,
    "split": split,
}
SEARCHED = "searched"


def run_case(case: str, options: argparse.Namespace, cluster: Cluster, fastest: str | None = None) -> Result:
    """One comparison; that of the search is with the plan of another case."""
    if fastest is None:
        ours, plan, other = CASES[case](options, cluster)
    else:
        (ours, plan), (other, _, _) = by_speed(options, cluster, {}), CASES[fastest](options, cluster)
    work = work_of(plan, cluster, dist.get_rank(), options.rows)
    alone = Alone(make_model(options), partial(make_batch, options), loss_fn, OPTIMIZER, work, options.seconds)
    for _ in range(options.warmup):
        ours(), other()
    pairs, ideals, speeds = [], [], []
    for number in range(options.pairs):
        pairs.append(pair_of(ours, other, options.steps, number))
        speeds.append(alone.rows_per_second())
        ideals.append(options.rows / sum(speeds[-1]) * work.fill)
    found = summary(pairs)
    efficiency = statistics.median(ideal / own.seconds for ideal, (own, _) in zip(ideals, pairs, strict=True))
    alone_of_each = [statistics.median(each) for each in zip(*speeds, strict=True)]
    ideal = statistics.median(ideals)
    return Result(found["whale_seconds"], found["peer_seconds"], ideal, efficiency, found["ratio"], alone_of_each, str(plan))


def run_ranks(options: argparse.Namespace) -> dict[str, Result]:
    """Measures the ranks, then all comparisons; every rank calls it."""
    measured = measure(make_model(options), make_batch(options, min(options.rows // 2, MOST_MEASURED)), loss_fn, options.rounds)
    cluster = measured.cluster
    if dist.get_rank() == 0:
        print(cluster)
    measured.write_profile(options.profile)
    results = {case: run_case(case, options, cluster) for case in options.only or CASES if case != SEARCHED}
    if SEARCHED in (options.only or (SEARCHED,)):
        fastest = min(results, key=lambda case: results[case].ours_seconds, default="data_parallel")
        names: list[str] = [fastest]
        dist.broadcast_object_list(names, 0)  # clocks differ a little between ranks
        results[SEARCHED] = run_case(SEARCHED, options, cluster, names[0])
    return results


def show(case: str, result: Result) -> None:
    speeds = ", ".join(f"{speed:.1f}" for speed in result.rows_per_second)
    times = (
        f"{1e3 * seconds:.1f} ms {name}"
        for name, seconds in (("ours", result.ours_seconds), ("even", result.even_seconds), ("ideal", result.ideal_seconds))
    )
    print(f"{case:14} {', '.join(times)}; efficiency {result.efficiency:.2f}, speedup {result.speedup:.2f}; alone {speeds} rows/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 0.5], metavar="SHARE", help="of a core, one per rank")
    numbers = {"pairs": 3, "steps": 1, "warmup": 1, "rounds": 5, "layers": 4, "width": 384, "context": 64, "rows": 128, "micro-batches": 8}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--megabits", type=float, metavar="N", help="per second, of the link of each rank (as root; default: no limit)")
    parser.add_argument("--seconds", type=float, default=2.0, help="to time the ranks alone after each pair (default 2)")
    parser.add_argument("--only", action="append", choices=[*CASES, SEARCHED], help="one comparison; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options.profile = Path(directory) / "profile.json"
        results = on_ranks(len(options.speeds), run_ranks, options, shares=options.speeds, megabits=options.megabits)
    for case, result in results.items():
        show(case, result)
    if options.json is not None:
        found = {case: asdict(result) for case, result in results.items()}
        options.json.write_text(json.dumps(found | {"speeds": options.speeds, "load": os.getloadavg()[0]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
