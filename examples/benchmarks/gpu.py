"""Whale on one GPU beside plain torch there: GPT-2 small and ResNet-50, pair by pair, and state that does not lie on the GPU.

    python examples/benchmarks/gpu.py --json gpu.json

eager      a training step of Whale against the same in a plain loop
compiled   the same with `runtime.compile` against the loop over `torch.compile(model)`
offload    GPT-2 with `memory.offload`, against Whale without
kernels    how many kernels a step launches, of Whale and of the plain loop, by the profiler
zero       GPT-2 on two ranks that share the GPU (messages go through host memory), per `memory.zero`; no times

Ratio = the peer's time / Whale's, the median over pairs of blocks, as overhead.py has it. Peak bytes are those that torch's allocator
held at most during a step, the other side's left out; the plan's are its estimate. Losses of both sides must agree.

It needs transformers and torchvision.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ranks import cost_of, on_ranks, pair_of

from whale.units import format_bytes

Batch = dict[str, Tensor]
Step = Callable[[], Tensor]
HALF = {"float32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)
STEADY = {"planning.search": "off", "memory.optimizer_states": 2}


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        make: the model, on the CPU.
        batch: of so many rows.
        loss: of what the model returns.
        rows: of a batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    rows: int


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def text(rows: int) -> Batch:
    ids = torch.randint(50257, (rows, 1025), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def next_token(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())


def resnet50() -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet50()  # type: ignore[no-any-return]


def images(rows: int) -> Batch:
    random = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 3, 224, 224, generator=random), "targets": torch.randint(1000, (rows,), generator=random)}


def classes(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["targets"])


MODELS = {"gpt2": Model(gpt2, text, next_token, 8), "resnet50": Model(resnet50, images, classes, 64)}


def inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "targets"}


def whale_step(model: Model, rows: int, config: dict[str, Any]) -> tuple[Step, whale.Engine]:
    batch = model.batch(rows)
    engine = whale.parallelize(model.make(), loss=model.loss, optimizer=OPTIMIZER, batch=batch, config={**STEADY, **config})
    there = {name: value.cuda() for name, value in batch.items()}
    return partial(engine.step, there), engine


def torch_step(model: Model, rows: int, dtype: str, compiles: bool) -> Step:
    module = model.make().cuda()
    ran: Callable[..., Any] = torch.compile(module) if compiles else module
    optimizer, batch = OPTIMIZER(module.parameters()), {name: value.cuda() for name, value in model.batch(rows).items()}
    half, scaler = HALF[dtype], torch.amp.GradScaler("cuda", enabled=dtype == "fp16")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", half) if half is not None else nullcontext():
            loss = model.loss(ran(**inputs(batch)), batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def host_seconds_of(step: Step, steps: int) -> float:
    """What the host takes to launch a step, of few, so that it never waits for a full queue."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - begin) / steps
    torch.cuda.synchronize()
    return seconds


def peak_of(make: Callable[[], Step], warmup: int) -> tuple[Step, list[float], int, float]:
    """A side, its first losses, the bytes at its peak without what was there before, and the seconds until its first step was done."""
    gc.collect()
    torch.cuda.empty_cache()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    step = make()
    losses = [float(step())]
    first = time.perf_counter() - begin
    losses += [float(step()) for _ in range(warmup - 1)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    torch.cuda.synchronize()
    return step, losses, torch.cuda.max_memory_allocated() - before, first


def predicted(engine: whale.Engine) -> dict[str, float]:
    plan = engine.plan
    estimates = [each for replica in plan.replicas for stage in replica.stages for each in stage.estimates]
    return {"plan_seconds": plan.step_seconds, "plan_bytes": max(each.parameter_bytes + each.activation_bytes for each in estimates)}


def alike(ours: list[float], theirs: list[float], tolerance: float) -> None:
    for own, peer in zip(ours, theirs, strict=True):
        assert abs(own - peer) <= tolerance * abs(peer), f"losses differ: whale {ours}, peer {theirs}"


def against_torch(name: str, dtype: str, compiles: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Pairs of blocks of steps of Whale and of a plain loop."""
    model, config = MODELS[name], {"precision.dtype": dtype}
    if compiles:
        config["runtime.compile"] = True  # type: ignore[assignment]
    engines: list[whale.Engine] = []

    def make() -> Step:
        step, engine = whale_step(model, options.rows or model.rows, config)
        engines.append(engine)
        return step

    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    ours, losses, bytes_, first = peak_of(make, options.warmup)
    peer, expected, peer_bytes, peer_first = peak_of(lambda: torch_step(model, options.rows or model.rows, dtype, compiles), options.warmup)
    alike(losses, expected, 2e-2 if HALF[dtype] is not None or compiles else 2e-3)
    pairs = [pair_of(ours, peer, options.steps, number) for number in range(options.pairs)]
    ratios = sorted(theirs.seconds / own.seconds for own, theirs in pairs)
    result = {
        "ratio": statistics.median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "whale_seconds": statistics.median(own.seconds for own, _ in pairs),
        "peer_seconds": statistics.median(theirs.seconds for _, theirs in pairs),
        "whale_host_seconds": host_seconds_of(ours, 3),
        "peer_host_seconds": host_seconds_of(peer, 3),
        "whale_bytes": bytes_,
        "peer_bytes": peer_bytes,
        "whale_first": first,
        "peer_first": peer_first,
        "losses": losses,
        "peer_losses": expected,
        **predicted(engines[0]),
    }
    if options.profile:
        for side, step in (("whale", ours), ("peer", peer)):
            with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
                step()
                torch.cuda.synchronize()
            table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
            (options.profile / f"{name}_{dtype}_{'compiled' if compiles else 'eager'}_{side}.txt").write_text(table)
    engines[0].close()
    return result


def offloaded(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 with state on the host, against all on the GPU."""
    model, engines = MODELS["gpt2"], []

    def make(offload: str) -> Step:
        step, engine = whale_step(model, options.rows or model.rows, {"precision.dtype": "bf16", "memory.offload": offload})
        engines.append(engine)
        return step

    ours, losses, bytes_, _ = peak_of(partial(make, kind), options.warmup)
    seconds = cost_of(ours, options.steps).seconds
    result = {"whale_seconds": seconds, "whale_bytes": bytes_, **predicted(engines[0])}
    engines[0].close()
    del ours
    engines.clear()
    base, expected, base_bytes, _ = peak_of(partial(make, "none"), options.warmup)
    alike(losses, expected, 2e-3)
    result |= {"peer_seconds": cost_of(base, options.steps).seconds, "peer_bytes": base_bytes, "losses": losses, "peer_losses": expected}
    result["ratio"] = result["peer_seconds"] / result["whale_seconds"]
    engines[0].close()
    return result


def num_kernels(step: Step) -> int:
    """Kernels that a step launches, copies and fills of memory included."""
    for _ in range(4):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())  # type: ignore[attr-defined]


def launched(name: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kernels per step of both sides."""
    model = MODELS[name]
    step, engine = whale_step(model, options.rows or model.rows, {"precision.dtype": dtype})
    ours = num_kernels(step)
    engine.close()
    del step, engine
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return {"whale_kernels": ours, "peer_kernels": num_kernels(torch_step(model, options.rows or model.rows, dtype, False))}


def with_zero(level: str, options: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 on two ranks of one GPU; of this rank."""
    torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    step, engine = whale_step(MODELS["gpt2"], 4, {"precision.dtype": "bf16", "memory.zero": level})
    losses = [float(step()) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = cost_of(step, 2).seconds
    result = {"whale_seconds": seconds, "whale_bytes": torch.cuda.max_memory_allocated(), "losses": losses, **predicted(engine)}
    engine.close()
    return result


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for name in MODELS:
        for dtype in options.dtypes:
            yield f"eager_{name}_{dtype}", partial(against_torch, name, dtype, False, options)
    for name in MODELS:
        yield f"compiled_{name}_bf16", partial(against_torch, name, "bf16", True, options)
    for name in MODELS:
        for dtype in ("float32", "bf16", "fp16"):
            yield f"kernels_{name}_{dtype}", partial(launched, name, dtype, options)
    for kind in ("optimizer", "optimizer+parameters", "activations"):
        yield f"offload_{kind}", partial(offloaded, kind, options)
    for level in ("0", "1", "2", "3"):
        yield f"zero_{level}", partial(on_ranks, 2, with_zero, level, options)


def line(result: dict[str, Any]) -> str:
    if "whale_kernels" in result:
        return f"kernels: whale {result['whale_kernels']}, peer {result['peer_kernels']}"
    words = []
    if "ratio" in result:
        spread = f" ({result['low']:.3f} to {result['high']:.3f})" if "low" in result else ""
        words.append(
            f"ratio {result['ratio']:.3f}{spread}, peer {1e3 * result['peer_seconds']:.2f} ms, {format_bytes(result['peer_bytes'])}"
        )
    words.append(f"whale {1e3 * result['whale_seconds']:.2f} ms, {format_bytes(result['whale_bytes'])}")
    words.append(f"plan {1e3 * result['plan_seconds']:.2f} ms, {format_bytes(int(result['plan_bytes']))}")
    if "whale_host_seconds" in result:
        words.append(f"host {1e3 * result['whale_host_seconds']:.2f} and {1e3 * result['peer_host_seconds']:.2f} ms")
        words.append(f"first step after {result['whale_first']:.1f} and {result['peer_first']:.1f} s")
    return "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="A,B", help="cases whose name begins so; all by default")
    parser.add_argument("--dtypes", default="float32,tf32,bf16,fp16", type=lambda names: names.split(","))
    parser.add_argument("--rows", type=int, default=0, help="of a batch; 8 and 64 by default")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the clock runs")
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--profile", type=Path, metavar="DIRECTORY", help="where the kernels of a step of either side are written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    failed = []
    for name, measure in cases(options):
        if not name.startswith(tuple(options.only.split(","))):
            continue
        try:
            found[name] = measure()
            print(f"{name}: {line(found[name])}", flush=True)
        except Exception:  # the others are measured all the same
            failed.append(name)
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if options.json is not None:
            options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **found}, indent=1))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
