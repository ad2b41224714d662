"""Shared-out state and half precision beside torch's own, on two CPU ranks in one run, pair by pair.

    python examples/benchmarks/state.py --json state.json

zero_1    `memory.zero: 1` against DistributedDataParallel with ZeroRedundancyOptimizer
zero_2    `memory.zero: 2` against the same
zero_3    `memory.zero: 3` against torch's fully_shard of each block and of the model
bf16      `precision.dtype: bf16` against DistributedDataParallel under torch.autocast
fp16      `precision.dtype: fp16` against the same with a GradScaler

With `--megabits N` (as root) the ranks are joined by links of that speed, and Whale is compared with itself:

deferred           `memory.zero: 1` on two ranks: updated weights on their way during the next forward pass, against before the step ends
deferred_pipeline  the same on four ranks, two replicas of two stages
copies             `memory.redundancy: 1` against 0 on two hosts of two ranks each, a stage each; what is predicted stands beside it
copies_replicas    the same with a replica each, which send nothing

Ratio = the peer's time / Whale's, as overhead.py has it. Peak bytes are those of the fuller rank, of each side in processes of its own:
what the process held at most, less what it held before the model was made.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import loss_fn
from overhead import OPTIMIZER, Step, check_equal, loop_step, make_batch, make_model, measure, own_rows, whale_step
from ranks import Result, line, on_ranks, pair_of, summary

import whale
from whale.config import Config
from whale.estimate import Costs, estimate
from whale.hardware import parse_cluster
from whale.units import format_bytes

SIZES = {"small": {"layers": 4, "width": 128}, "large": {"layers": 6, "width": 512}}


def shared_out(options: argparse.Namespace) -> Step:
    """Data parallelism by torch, each rank with a part of the optimizer's state."""
    model = nn.parallel.DistributedDataParallel(make_model(options), gradient_as_bucket_view=True)
    return loop_step(model, own_rows(options), partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-3))


def fully_sharded(options: argparse.Namespace) -> Step:
    """Data parallelism by torch, all state in even parts, each block gathered before it runs."""
    model = make_model(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop_step(model, own_rows(options), OPTIMIZER)


def autocast(options: argparse.Namespace, dtype: torch.dtype) -> Step:
    """Data parallelism by torch in half precision."""
    model, batch = nn.parallel.DistributedDataParallel(make_model(options), gradient_as_bucket_view=True), own_rows(options)
    optimizer, scaler = OPTIMIZER(model.parameters()), torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_fn(model(batch["ids"]), batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def given_early_or_late(case: str, options: argparse.Namespace) -> Result:
    """The times of Whale with updated weights on their way during the next forward passes, and before a step ends."""
    stages, more = DEFERRED[case][1:]
    config = {"memory.zero": "1", "communication.bucket_bytes": BUCKET_BYTES, **more}
    ours, peer = (whale_step(options, stages, {**config, "communication.defer_weights": defers}) for defers in (True, False))
    return measure(ours, peer, options, 0.0)


def with_and_without_copies(case: str, options: argparse.Namespace) -> Result:
    """The times of Whale with copies of the state on second hosts, and without, and what the copies take by both and by the estimate."""
    link = f"{{bandwidth: {options.megabits} Mbit/s, latency: 100 us}}"
    hosts = ", ".join(f"{{name: {name}, devices: 2 x cpu, link: {link}}}" for name in "ab")
    cluster, batch = parse_cluster(f"hosts: [{hosts}]\nnetwork: {link}"), make_batch(options)

    def engine_of(redundancy: int) -> whale.Engine:
        config = {"planning.search": "off", "memory.redundancy": redundancy}
        config["runtime.keep_on_fault"] = f"/dev/shm/no_fault_{dist.get_rank() // 2}"  # ranks with one folder are on one host
        model = make_model(options, COPIES[case])
        made = whale.parallelize(model, loss=loss_fn, optimizer=OPTIMIZER, batch=batch, cluster=cluster, config=config)
        made.resume("none")
        return made

    copying, plain = engine_of(1), engine_of(0)
    for _ in range(options.warmup):
        first, second = copying.step(batch), plain.step(batch)
    check_equal(first, second, 0.0)
    pairs = [pair_of(partial(copying.step, batch), partial(plain.step, batch), options.steps, number) for number in range(options.pairs)]
    predicted = estimate(copying.plan, copying.model_graph, cluster, Costs.of(Config({"memory.redundancy": 1}))).redundancy
    assert predicted is not None
    copies = {
        "copy_seconds": statistics.median(own.seconds - other.seconds for own, other in pairs),
        "predicted_seconds": predicted.seconds,
    }
    return {**summary(pairs), **copies}


COPIES = {"copies": 4, "copies_replicas": 0}
"""Stages."""

BUCKET_BYTES = 2**19
DEFERRED: dict[str, tuple[int, int, dict[str, object]]] = {
    "deferred": (2, 0, {}),
    "deferred_pipeline": (4, 2, {"pipeline.num_micro_batch": 4}),
}
"""Ranks, stages and settings."""

Make = Callable[[argparse.Namespace], Step]
CASES: dict[str, tuple[Make, Make]] = {
    "zero_1": (partial(whale_step, stages=0, config={"memory.zero": "1"}), shared_out),
    "zero_2": (partial(whale_step, stages=0, config={"memory.zero": "2"}), shared_out),
    "zero_3": (partial(whale_step, stages=0, config={"memory.zero": "3"}), fully_sharded),
    "bf16": (partial(whale_step, stages=0, config={"precision.dtype": "bf16"}), partial(autocast, dtype=torch.bfloat16)),
    "fp16": (partial(whale_step, stages=0, config={"precision.dtype": "fp16"}), partial(autocast, dtype=torch.float16)),
}


def run_case(case: str, options: argparse.Namespace) -> Result:
    """The times of both sides, which have trained alike."""
    ours, peer = (make(options) for make in CASES[case])
    return measure(ours, peer, options, 1e-3 if case.startswith("zero") else 2e-2)


def peak_bytes(case: str, side: int, options: argparse.Namespace) -> int:
    """What the fuller rank has held at most since before the model was made."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = CASES[case][side](options)
    for _ in range(options.warmup + 2):
        step()
    held = torch.tensor(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in {"pairs": 9, "steps": 4, "warmup": 3, "context": 64, "rows": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--megabits", type=float, metavar="N", help="per second, of the link of each rank; compares Whale with itself")
    parser.add_argument("--only", choices=sorted({**CASES, **DEFERRED, **COPIES}), help="one comparison")
    parser.add_argument("--size", choices=sorted(SIZES), help="one size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for size in [options.size] if options.size else SIZES:
        sized = argparse.Namespace(**vars(options), **SIZES[size])
        for case in [options.only] if options.only else CASES if options.megabits is None else [*DEFERRED, *COPIES]:
            if case in COPIES:
                found[f"{case} {size}"] = own = on_ranks(4, with_and_without_copies, case, sized, megabits=options.megabits)
                seconds = f"copies take {1e3 * own['copy_seconds']:.1f} ms, predicted {1e3 * own['predicted_seconds']:.1f} ms"
                print(f"{case} {size:6} {line(own)}; {seconds}", flush=True)
                continue
            if case in DEFERRED:
                found[f"{case} {size}"] = on_ranks(DEFERRED[case][0], given_early_or_late, case, sized, megabits=options.megabits)
                print(f"{case} {size:6} {line(found[f'{case} {size}'])}", flush=True)
                continue
            result = on_ranks(2, run_case, case, sized)
            ours, peers = (on_ranks(2, peak_bytes, case, side, sized) for side in (0, 1))
            found[f"{case} {size}"] = {**result, "whale_peak_bytes": ours, "peer_peak_bytes": peers}
            print(f"{case} {size:6} {line(result)}; peak {format_bytes(ours)} and {format_bytes(peers)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
