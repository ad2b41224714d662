"""The ranks of a benchmark on this machine: processes of one thread each, in a Gloo group, timed together.

They meet at a store of the process that starts them, on a port that the system chose when the store was made: two
benchmarks at once cannot take each other's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from miniature import Links, slow_links, slowed

HOST = "127.0.0.1"
PR_SET_PDEATHSIG = 1
Result = dict[str, float]


def on_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, shares: Sequence[float] = (), megabits: float | None = None
) -> Any:
    """Calls a function on every rank; a single rank is in no process group.

    Args:
        num_ranks: processes to start.
        function: of the top level of a module.
        *arguments: what it is called with; these and its result must pickle.
        shares: of a core, one per rank, that the ranks are slowed to.
        megabits: per second, of the link of each rank; None joins them by this machine's own.

    Returns:
        What it gave on rank 0.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    results = mp.get_context("spawn").SimpleQueue()
    with terminable(), slow_links(num_ranks, megabits) if megabits is not None else nullcontext() as links:
        ranks = mp.spawn(_run, (os.getpid(), num_ranks, store.port, links, function, arguments, results), nprocs=num_ranks, join=False)  # type: ignore[attr-defined]
        with ended(ranks.processes), slowed(ranks.pids(), shares) if shares else nullcontext():
            while not ranks.join():
                pass
    return results.get()


@contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM be an exception, so that ranks, groups and links end with this process."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ended(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Ends processes that still run when it closes."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _end_with(starter: int) -> None:
    """Lets this process end when the one that started it does, however that ends, and also where this one is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        raise SystemExit("what started this rank is no more")


def _run(
    rank: int,
    starter: int,
    num_ranks: int,
    port: int,
    links: Links | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    _end_with(starter)
    torch.set_num_threads(1)
    if links is not None:
        links.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if num_ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
        store = dist.TCPStore(HOST if links is None else links.outside, port)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    result = function(*arguments)
    if rank == 0:
        results.put(result)
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


class Cost(NamedTuple):
    """What a step took.

    Attributes:
        seconds: from a common start to the end of the slowest rank.
        cpu_seconds: of all threads of all ranks together; the same on a busy machine as on a quiet one.
    """

    seconds: float
    cpu_seconds: float


def cost_of(step: Callable[[], object], steps: int) -> Cost:
    """Of one step, the mean over a block; every rank calls it."""
    meet()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    meet()
    seconds, cpu_seconds = time.perf_counter() - begin, torch.tensor(time.process_time() - cpu_begin, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(cpu_seconds)
    return Cost(seconds / steps, float(cpu_seconds) / steps)


Pair = tuple[Cost, Cost]
"""Ours and the peer's."""


def pair_of(ours: Callable[[], object], peer: Callable[[], object], steps: int, number: int) -> Pair:
    """Times a block of steps of either side; which is first changes with the number of the pair."""
    if number % 2 == 0:
        own = cost_of(ours, steps)
        return own, cost_of(peer, steps)
    theirs = cost_of(peer, steps)
    return cost_of(ours, steps), theirs


def compared(ours: Callable[[], object], peer: Callable[[], object], steps: int, pairs: int, first: Sequence[Pair] = ()) -> Result:
    """Times blocks of steps of either side in pairs, in alternating order, so that a slow moment of the machine hits both.

    Args:
        steps: of a block.
        first: what the steps before have taken, one by one; ``all_ratio`` and ``all_cpu_ratio`` are of their sum with the blocks.
    """
    costs = [pair_of(ours, peer, steps, number) for number in range(pairs)]
    weighted = [(pair, 1) for pair in first] + [(pair, steps) for pair in costs]
    sums = [[sum(pair[side][what] * number for pair, number in weighted) for what in (0, 1)] for side in (0, 1)]
    ratios = {"all_ratio": sums[1][0] / sums[0][0], "all_cpu_ratio": sums[1][1] / sums[0][1]}
    return {**summary(costs), **ratios, "num_steps": len(first) + steps * pairs}


def summary(costs: Sequence[Pair]) -> Result:
    """Medians in seconds per step, and of the peer's / ours: ``ratio`` of the times, ``cpu_ratio`` of the CPU times."""
    ratios = sorted(theirs.seconds / own.seconds for own, theirs in costs)
    quarter = len(ratios) // 4
    return {
        "ratio": statistics.median(ratios),
        "low_quartile": ratios[quarter],
        "high_quartile": ratios[-1 - quarter],
        "whale_seconds": statistics.median(own.seconds for own, _ in costs),
        "peer_seconds": statistics.median(theirs.seconds for _, theirs in costs),
        "cpu_ratio": statistics.median(theirs.cpu_seconds / own.cpu_seconds for own, theirs in costs),
        "whale_cpu_seconds": statistics.median(own.cpu_seconds for own, _ in costs),
        "peer_cpu_seconds": statistics.median(theirs.cpu_seconds for _, theirs in costs),
        "num_pairs": len(costs),
    }


def line(result: Result) -> str:
    """The figures in words."""
    return (
        f"whale {1e3 * result['whale_seconds']:7.2f} ms, peer {1e3 * result['peer_seconds']:7.2f} ms per step, ratio {result['ratio']:.3f} "
        f"(quartiles {result['low_quartile']:.3f} to {result['high_quartile']:.3f}, {result['num_pairs']} pairs); CPU of all ranks "
        f"{1e3 * result['whale_cpu_seconds']:.2f} and {1e3 * result['peer_cpu_seconds']:.2f} ms, ratio {result['cpu_ratio']:.3f}"
        + (
            f"; first {result['num_steps']} steps: {result['all_ratio']:.3f}, CPU {result['all_cpu_ratio']:.3f}"
            if "num_steps" in result
            else ""
        )
    )


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call, from a common start on all ranks."""
    meet()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def slowest(seconds: float) -> float:
    """The greatest of all ranks' seconds."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def meet() -> None:
    """Waits for all ranks, and for what they have given a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
