"""What messages take of a CPU rank's own time: the processor time of sums in which all ranks take part, by the share of a core that it has.

    | addition | sum | addition | sum |  less  | addition | addition |      the caches are cold for each sum, as they are in a step
    rank of a third of a core: 2 ms of the processor for a sum are 6 ms in which it cannot compute

Processor time is the same on a busy machine as on a quiet one, but for caches. A GPU moves what it sends beside its computing, or lends it
a part that nobody has measured: nothing is said of it.

Sums are of sizes that steps send. What wakes threads costs the more the more there is to carry: a message of 8 KiB to 1 MiB takes 0.2 to
0.4 ms of a core, one of 4 bytes sent again and again 0.05, so that of those two a line would be neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from whale.measure.link_speed import exchange_rounds, seconds_of_bytes
from whale.measure.samples import Clock, Samples, own_time

HANDLING, HANDLED_BYTES = "handling of a message", "handling of bytes"
SMALL_BYTES, LARGE_BYTES = 1 << 20, 1 << 24
"""Of a sum: what a split group exchanges, and about a bucket of gradients."""
PERIODS = 0.1
"""Seconds of computing by which a rank's share of a core is told: some periods of what gives it its share."""
SWEPT_BYTES = 1 << 22
"""Of each of the three tensors of an addition: about what caches of one core hold."""
LEAST_OF_SUM = 0.05
"""So much of the time of an addition and a sum is the sum's, and so much of that the messages', at least: less is noise."""


def handling_samples(clock: Clock) -> Iterator[Samples]:
    """Measures this rank's part in sums over all ranks, of which there are several; every rank, on a CPU, calls it."""
    world = clock.world
    with world.speaking("measuring what messages take of a rank"):
        share = _share_of_core(clock)
        tensors = (torch.zeros(size // 4) for size in (SMALL_BYTES, LARGE_BYTES))
        calls = (partial(_add_and_sum, *_swept(), tensor) for tensor in (None, *tensors))
        alone, *both = (exchange_rounds(clock, call, time.process_time) for call in calls)
    small, large = (seconds_of_bytes(each, median(alone), LEAST_OF_SUM) for each in both)
    count = 4 * (world.size - 1)  # messages around the ring and around again, each sent and received
    rest = [each / share for each in seconds_of_bytes(large, median(small))]
    of_small = median(rest) * share * SMALL_BYTES / (LARGE_BYTES - SMALL_BYTES)
    yield Samples(HANDLING, "s", tuple(each / count / share for each in seconds_of_bytes(small, of_small, LEAST_OF_SUM)))
    yield Samples.rates(HANDLED_BYTES, "B/s", (LARGE_BYTES - SMALL_BYTES) * count / world.size, rest)


def _share_of_core(clock: Clock) -> float:
    """The share of a core with which this rank computes while all do; what lies unused of one moment is used up before."""
    numbers = torch.ones(1 << 12)
    clock.world.barrier()
    shares = []
    for _ in range(clock.num_rounds + 1):
        shares.append(_share(numbers))
    return median(shares[1:])


def _share(numbers: Tensor) -> float:
    now = own_time(numbers.device)
    wall, own = time.perf_counter(), now()
    while time.perf_counter() - wall < PERIODS:
        numbers.mul_(1.0)
    return (now() - own) / (time.perf_counter() - wall)


def _swept() -> tuple[Tensor, Tensor, Tensor]:
    a, b, total = (torch.zeros(SWEPT_BYTES // 4) for _ in range(3))
    return a, b, total


def _add_and_sum(a: Tensor, b: Tensor, total: Tensor, tensor: Tensor | None) -> None:
    torch.add(a, b, out=total)
    if tensor is not None:
        dist.all_reduce(tensor)
