"""What `tests.gpu.prove` runs in processes of their own: a rank per GPU, or two without.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.on_gpus laws
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

import whale

RANK, SIZE, LOCAL = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
TYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def versions() -> None:
    """Prints what is here; fails where torch has no kernels for the GPU."""
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, whale {whale.__version__}, CUDA {torch.version.cuda}")
    for number in range(torch.cuda.device_count()):
        print(f"GPU {number}: {torch.cuda.get_device_name(number)}, {torch.cuda.get_device_capability(number)}")
        (torch.ones(4, device=f"cuda:{number}") + 1).sum().item()


def _join() -> torch.device:
    """Joins the group of all ranks; the device of this one."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", LOCAL % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl" if torch.cuda.device_count() >= SIZE else "gloo", device_id=device)
    return device


def backend() -> None:
    """Sums, a barrier, a group of its own and its end; which types can be sent."""
    device = _join()
    group, value = dist.new_group(list(range(SIZE))), torch.ones(4, device=device)
    dist.all_reduce(value, group=group)
    dist.barrier(group)
    assert value.tolist() == [float(SIZE)] * 4
    refused = []
    for dtype in TYPES:
        try:
            dist.broadcast(torch.zeros(4, dtype=dtype, device=device), 0)
        except (RuntimeError, TypeError, ValueError):
            refused.append(str(dtype))
    dist.destroy_process_group()
    print(f"{SIZE} rank on {device}: types that are refused: {', '.join(refused) or 'none'}")


def contexts() -> None:
    """Counts the processes that have a context on each GPU, while all ranks train there."""
    import pynvml

    device, before = _join(), _processes(pynvml)
    dist.barrier()
    torch.ones(1, device=device).sum().item()
    dist.barrier()
    made = {number: pids - before.get(number, set()) for number, pids in _processes(pynvml).items()}
    dist.barrier()
    own = [number for number, pids in made.items() if os.getpid() in pids]
    if not any(made.values()):
        print("the driver names no processes, as in most containers: not counted")
    else:
        assert own == [device.index], f"rank {RANK} on GPU {device.index} has contexts on {own}"
        print(f"rank {RANK}: a context on GPU {device.index} alone; {len(made[own[0]])} processes there")
    dist.destroy_process_group()


def _processes(pynvml: object) -> dict[int, set[int]]:
    pynvml.nvmlInit()  # type: ignore[attr-defined]
    found = {}
    for number in range(torch.cuda.device_count()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)  # type: ignore[attr-defined]
        found[number] = {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}  # type: ignore[attr-defined]
    return found


def laws() -> None:
    """Trains by Whale on all ranks and by torch on each, in three precisions under each plan."""
    from tests.gpu.test_ranks_on_one_gpu import PLANS, PRECISIONS, train_by_torch, train_by_whale

    device = torch.device("cuda", LOCAL) if torch.cuda.is_available() else torch.device("cpu")
    plans = [plan for plan in PLANS if plan != "one device"] if device.type == "cuda" else ["replicas", "1f1b", "zero 1"]
    for dtype, (_, tolerance) in PRECISIONS.items():
        expected, weights = train_by_torch(dtype, device)
        for plan in plans:
            losses, found = train_by_whale(RANK, SIZE, dtype, plan)
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=0)
            for name, value in weights.items():
                torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * float(value.abs().max()))
    if RANK == 0:
        names = dist.get_backend_config() if dist.is_initialized() else "no group"
        print(f"{SIZE} ranks over {names}: {len(plans)} plans in {', '.join(PRECISIONS)} as the plain loop")


def overlap() -> None:
    """Times a sum, products, and both at once."""
    device = _join()
    value, matrix = torch.ones(64 << 20, device=device), torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)

    def both(sums: bool, products: bool) -> None:
        work = dist.all_reduce(value, async_op=True) if sums else None
        for _ in range(20 if products else 0):
            matrix @ matrix
        if work is not None:
            work.wait()

    seconds = []
    for arguments in ((True, False), (False, True), (True, True)):
        both(*arguments)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            both(*arguments)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / 10)
    alone, together = seconds[0] + seconds[1], seconds[2]
    if RANK == 0:
        print(f"sum {1e3 * seconds[0]:.2f} ms, products {1e3 * seconds[1]:.2f} ms, both at once {1e3 * together:.2f} ms")
    dist.destroy_process_group()
    assert together < alone, "nothing overlaps"


def receives() -> None:
    """Times a pipeline over all ranks that receives messages early, and one that receives them late."""
    width, steps = (2048, 20) if torch.cuda.is_available() else (64, 2)
    milliseconds = []
    for early in (True, False):
        torch.manual_seed(0)
        engine = whale.parallelize(
            nn.Sequential(*(nn.Linear(width, width) for _ in range(4 * SIZE))),
            loss=lambda output, batch: output.square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            batch=torch.randn(512, width),
            config={"pipeline.num_stages": SIZE, "pipeline.num_micro_batch": 8, "pipeline.receive_early": early, "planning.search": "off"},
        )
        for step in range(2 * steps):
            if step == steps:
                float(engine.step(torch.randn(512, width)))
                begun = time.perf_counter()
            loss = engine.step(torch.randn(512, width))
        float(loss)
        milliseconds.append((time.perf_counter() - begun) / steps * 1e3)
        engine.close()
    if RANK == 0:
        print(f"a step takes {milliseconds[0]:.2f} ms; {milliseconds[1]:.2f} ms with pipeline.receive_early: false")


RUNS: dict[str, Callable[[], None]] = {each.__name__: each for each in (versions, backend, contexts, laws, overlap, receives)}

if __name__ == "__main__":
    RUNS[sys.argv[1]]()
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group()
