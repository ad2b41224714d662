"""The studies in the text of the Megatron-LM paper, each as two or more simulated runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from figure import Figure
from runs import COSTS, Run, simulate, written


def megatron_studies() -> Iterator[Figure]:
    """Narayanan et al., SC'21, what its text says of its studies: ratios of throughput, and which setting is best.

    Models, batches and plans are those of the scripts published with the code (examples/sc21). Where the text says "up to" or "at least",
    the setting of the figure at which the effect is largest, or least, is taken. Computing a block again costs what its forward pass did, a
    quarter of all where the backward pass is twice that; a third, as the text says, needs a backward pass no longer than the forward.
    The worst of tensor degrees is 2 with 32 stages, by its bubble; the factor of up to 2 is said of all studies, whose figures are drawn.
    """
    yield from _interleaving()
    yield from _recomputation()
    yield from _micro_batches()
    yield from _tensor_and_pipeline()
    yield from _beside_data_parallelism()


def _run(
    layers: int, hidden: int, heads: int, tensor: int, stages: int, batch: int, rows: int = 1, replicas: int = 1, **more: object
) -> Run:
    where = "A100-80GB", tensor * stages * replicas, 8, "infiniband-hdr", None
    return Run(layers, hidden, heads, 2048, 51200, *where, batch, written(tensor, replicas, stages, rows, **more), 1.0)


def _seconds(run: Run) -> float:
    return simulate(run).step_seconds


def _interleaving() -> Iterator[Figure]:
    run = _run(96, 12288, 96, 8, 12, 60, num_chunks=4, schedule="interleaved")
    quick, plain = _seconds(run), _seconds(replace(run, plan=written(8, 1, 12, 1)))
    whole = simulate(run, scatters=False).step_seconds
    unfused = simulate(run, costs=replace(COSTS, fuses_pointwise=False)).step_seconds
    yield Figure("175 billion, 96 GPUs, 60 rows: interleaved over plain", 1.10, plain / quick, "at least")
    yield Figure("the same: crossing in parts (scatter/gather) over whole", 1.11, whole / quick, "up to")
    yield Figure("the same: fused pointwise kernels over one by one", 135 / 113, unfused / quick)


def _recomputation() -> Iterator[Figure]:
    again, kept = (_run(80, 12288, 96, 8, 16, 1, recompute=kind) for kind in ("blocks", "none"))
    yield Figure(
        "145 billion, 128 GPUs: computing blocks again over keeping all, 1 row", 0.67, _seconds(kept) / _seconds(again), "at least"
    )


def _micro_batches() -> Iterator[Figure]:
    seconds = {rows: _seconds(_run(32, 15360, 128, 8, 8, 128, rows)) for rows in (1, 2, 4, 8)}
    what = "91 billion, 64 GPUs: time with micro-batches of 2 rows over the best of 1, 2, 4, 8 rows"
    yield Figure(what, 1.0, seconds[2] / min(seconds.values()))


def _tensor_and_pipeline() -> Iterator[Figure]:
    seconds = {tensor: _seconds(_run(32, 20480, 128, tensor, 64 // tensor, 32)) for tensor in (2, 4, 8, 16, 32)}
    best = min(seconds.values())
    yield Figure("162 billion, 64 GPUs, 32 rows: time with tensor degree 8 over the best of 2, 4, 8, 16, 32", 1.0, seconds[8] / best)
    yield Figure("the same: time of the worst over the best", 2.0, max(seconds.values()) / best, "up to")


def _beside_data_parallelism() -> Iterator[Figure]:
    degrees = (2, 4, 8, 16, 32)
    for what, tensor, stages in (("stages", 1, 0), ("tensor degree", 0, 1)):
        runs = [_run(32, 3840, 32, tensor or n, stages or n, 512, replicas=64 // n) for n in degrees]
        seconds = [_seconds(run) for run in runs]
        slower = sum(a < b for a, b in pairwise(seconds))
        told = f"5.9 billion, 64 GPUs, 512 rows one by one: doublings of {what}, from 2 to 32 in place of replicas, that are slower"
        yield Figure(told, 4, slower)
