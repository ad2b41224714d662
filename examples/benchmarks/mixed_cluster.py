"""What balance brings on a mixed cluster in miniature: two ranks of this machine, slowed to shares of a core, in one run side by side.

    python examples/benchmarks/mixed_cluster.py --speeds 1.0 0.33 --json mixed.json

data_parallel  rows by speed, against DistributedDataParallel with equal batches
pipeline       a cut by speed, against an even cut of the same layers
split          heads and features by speed, against equal sizes
searched       what the planner finds for the model without any scope, against the fastest of those above

Nothing tells the planner the shares: the ranks measure what they and the model on them reach, all at once (`whale probe`, `whale
profile`), and the plans are for what was measured. `--megabits` joins the ranks by links of that speed.
A bound beside the times: a rank's speed is the rows per second of the plain training step on that rank alone, while all ranks
compute; the ideal of a step is its rows by the sum of the speeds, times (m + p - 1) / m of a pipeline's fill; efficiency is ideal /
measured, speedup even / ours. Blocks of steps of either side alternate, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale
from whale.ir.cluster import Cluster, Host

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, loss_fn
from measuring import measure
from ranks import compared, on_ranks

Step = Callable[[], object]
Batch = dict[str, Tensor]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)
HEADS = 16


@dataclass(frozen=True)
class Result:
    """One comparison, in seconds per step.

    Attributes:
        ours_seconds, even_seconds: medians, of the plan that knows the speeds and of equal parts; of the search, of what it finds
            and of the fastest other plan.
        ideal_seconds: no communication, no bubble but the pipeline's fill, every rank busy at its own speed.
        efficiency: ideal / ours.
        speedup: even / ours, the median over pairs of blocks.
        rows_per_second: of each rank alone in its work.
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


def whale_side(options: argparse.Namespace, cluster: Cluster, config: dict[str, object], **scopes: int) -> tuple[Step, str]:
    """A step under a plan for this cluster, and the plan."""
    batch = make_batch(options, options.rows)
    engine = whale.parallelize(
        make_model(options, **scopes), loss=loss_fn, optimizer=OPTIMIZER, batch=batch, config=config, cluster=cluster
    )
    return partial(engine.step, batch), str(engine.plan)


def by_speed(options: argparse.Namespace, cluster: Cluster, config: dict[str, object], **scopes: int) -> tuple[Step, str]:
    """A step under a plan for what was measured of these devices and of the model on them."""
    return whale_side(options, cluster, {"cluster.profile": str(options.profile), **config}, **scopes)


def loop_side(model: nn.Module, batch: Batch) -> Step:
    """The plain training step."""
    optimizer = OPTIMIZER(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model(batch["ids"]), batch).backward()
        optimizer.step()

    return step


def distributed_data_parallel(options: argparse.Namespace) -> Step:
    """Equal batches; where the ranks do not divide the rows, the first ones have one more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {name: tensor.tensor_split(size)[rank] for name, tensor in make_batch(options, options.rows).items()}
    return loop_side(nn.parallel.DistributedDataParallel(make_model(options)), own)


def rows_per_second(options: argparse.Namespace, rows: int) -> list[float]:
    """Of the plain training step on each rank alone, while all of them compute, with no communication."""
    step = loop_side(make_model(options), make_batch(options, rows))
    step()
    dist.barrier()
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < options.seconds:
        step()
        done += rows
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, done / (time.perf_counter() - begin))
    return found


def even(cluster: Cluster) -> Cluster:
    """The same cluster, as if all its devices were like the first."""
    first = cluster.devices[0]

    def like_first(host: Host) -> Host:
        return replace(host, devices=tuple(replace(first, name=device.name, host=device.host) for device in host.devices))

    return replace(cluster, hosts=tuple(like_first(host) for host in cluster.hosts))


def data_parallel(options: argparse.Namespace, cluster: Cluster) -> tuple[Step, str, Step]:
    return *by_speed(options, cluster, {"planning.search": "off"}), distributed_data_parallel(options)


def pipeline(options: argparse.Namespace, cluster: Cluster) -> tuple[Step, str, Step]:
    config: dict[str, object] = {"pipeline.num_micro_batch": options.micro_batches, "pipeline.schedule": "1f1b"}
    size = dist.get_world_size()
    other, _ = whale_side(options, cluster, config, stages=size)
    return *by_speed(options, cluster, config | {"pipeline.num_stages": size}), other


def split(options: argparse.Namespace, cluster: Cluster) -> tuple[Step, str, Step]:
    size = dist.get_world_size()
    other, _ = whale_side(options, even(cluster), {}, split=size)
    return *by_speed(options, cluster, {}, split=size), other


CASES: dict[str, Callable[[argparse.Namespace, Cluster], tuple[Step, str, Step]]] = {
    "data_parallel": data_parallel,
    "pipeline": pipeline,
    "split": split,
}
SEARCHED = "searched"


def fill(case: str, options: argparse.Namespace) -> float:
    """How many times longer a step takes for a pipeline to fill and drain."""
    waits = dist.get_world_size() - 1 if case == "pipeline" else 0
    return 1 + waits / options.micro_batches


def run_case(case: str, options: argparse.Namespace, cluster: Cluster, fastest: str | None = None) -> Result:
    """One comparison; that of the search is with the plan of another case."""
    if fastest is None:
        ours, plan, other = CASES[case](options, cluster)
    else:
        (ours, plan), (other, _, _) = by_speed(options, cluster, {}), CASES[fastest](options, cluster)
    for _ in range(options.warmup):
        ours(), other()
    found = compared(ours, other, options.steps, options.pairs)
    speeds = rows_per_second(options, max(1, options.rows // dist.get_world_size()))
    ideal = options.rows / sum(speeds) * fill(case, options)
    seconds = found["whale_seconds"]
    return Result(seconds, found["peer_seconds"], ideal, ideal / seconds, found["ratio"], speeds, plan)


def run_ranks(options: argparse.Namespace) -> dict[str, Result]:
    """Measures the ranks, then all comparisons; every rank calls it."""
    measured = measure(make_model(options), make_batch(options, options.rows // 2), loss_fn, options.rounds)
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
    numbers = {"pairs": 3, "steps": 2, "warmup": 1, "rounds": 5, "layers": 4, "width": 384, "context": 64, "rows": 32, "micro-batches": 8}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--megabits", type=float, metavar="N", help="per second, of the link of each rank (as root; default: no limit)")
    parser.add_argument("--seconds", type=float, default=3.0, help="to time each rank alone (default 3)")
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
