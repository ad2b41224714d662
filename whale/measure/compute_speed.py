"""How fast a device computes: matrix products by type and size, its memory, and the start of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from whale.measure.samples import Clock, Samples

PRODUCTS = "products of"
MEMORY = "memory"
KERNEL_START = "start of a kernel"

DTYPES = ("float32", "bfloat16", "float16", "float64")
SIZES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Rows and columns of the square matrices, by kind of device."""
LONGEST_PRODUCT = 0.1
"""Seconds: of a type, products larger than one that takes so long are left out."""
BEYOND_CACHES = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Bytes of each of the three tensors of an addition, or of all weights of an update, so that the memory is what is measured."""
NUM_WEIGHTS = 8
"""Tensors that an update is of."""
NUM_STARTS = 200
"""Small ops of one call: what starting one costs is a share of many."""


def compute_samples(clock: Clock) -> Iterator[Samples]:
    """Measures this rank's device while all ranks do the same: what they share (cores, memory) is shared as in a run."""
    kind = clock.world.device.type
    for dtype in DTYPES:
        yield from _products(clock, dtype, SIZES[kind])
    yield _memory(clock, BEYOND_CACHES[kind])
    small = torch.ones(1, device=clock.world.device, requires_grad=True)
    starts = clock.rounds(partial(_add_often, small), num_repeats=1)
    yield Samples(KERNEL_START, "s", tuple(each / NUM_STARTS for each in starts))


def alone_samples(clock: Clock) -> Samples:
    """The largest product in float32 while the other ranks of its host are idle: on the host's first rank, elsewhere nothing."""
    size = SIZES[clock.world.device.type][-1]
    measures = clock.world.local_rank == 0 and clock.world.local_size > 1
    call = _product("float32", size, clock.world.device) if measures else None
    seconds = clock.rounds(call)
    return Samples.rates(f"{PRODUCTS} float32, {size} x {size}, one rank alone", "FLOP/s", 2.0 * size**3, seconds)


def _memory(clock: Clock, num_bytes: int) -> Samples:
    """The rate of an addition; on a CPU that of Adam's update, whose weights, gradients and two states count as read and written.

    A cache that cores share may hold, or not, what one addition reads: of two ranks on like cores 48 MB took one nearly twice as long
    as the other, by their own time, where the update of their weights took both the same.
    """
    if clock.world.device.type == "cpu":
        weights = [nn.Parameter(torch.zeros(num_bytes // 4 // NUM_WEIGHTS)) for _ in range(NUM_WEIGHTS)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        return Samples.rates(MEMORY, "B/s", 2 * 4 * num_bytes, clock.rounds(torch.optim.AdamW(weights, fused=True).step))
    a, b, total = (torch.zeros(num_bytes // 4, device=clock.world.device) for _ in range(3))
    return Samples.rates(MEMORY, "B/s", 3 * num_bytes, clock.rounds(partial(torch.add, a, b, out=total)))


def _products(clock: Clock, dtype: str, sizes: tuple[int, ...]) -> Iterator[Samples]:
    for size in sizes:
        call = _product(dtype, size, clock.world.device)
        longest = clock.once(call)
        yield Samples.rates(f"{PRODUCTS} {dtype}, {size} x {size}", "FLOP/s", 2.0 * size**3, clock.rounds(call))
        if longest > LONGEST_PRODUCT:  # of all ranks, so that all stop at the same size
            return


def _product(dtype: str, size: int, device: torch.device) -> partial[Tensor]:
    a, b = (torch.ones(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _add_often(small: Tensor) -> None:
    x = small
    for _ in range(NUM_STARTS):
        x = x + small
