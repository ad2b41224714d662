"""Speed of messages between ranks, one pair alone and all at once; and the processor time that messages take of a CPU rank.

host a   0  1  2  3        alone inside     0 - 1          at once inside    0 > 1 > 2 > 3 > 0
host b   4  5  6  7        alone between    0 - 4          at once between   0 - 4  1 - 5  2 - 6  3 - 7

A rank's own time is the processor time of all-reduces over all ranks, divided by its share of a core:

    | addition | sum | addition | sum |  less  | addition | addition |      caches are cold for each sum, as in a step
    rank of a third of a core: 2 ms of processor time for a sum are 6 ms in which it cannot compute

Processor time is the same on a busy machine as on an idle one, except for caches. A GPU copies while it computes, and the part that it
lends is not measured.

The sums have sizes of real steps: the cost of waking threads grows with the load. A message of 8 KiB to 1 MiB takes 0.2 to 0.4 ms of a
core, one of 4 bytes in a loop 0.05 ms, so that a line through those two would fit neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import World, backend_of
from whale.measure.samples import RoundTimer, Samples, own_time

ALONE, AT_ONCE = "alone", "all at once"
LATENCY, BANDWIDTH = "latency", "bandwidth"
SMALL_BYTES, LARGE_BYTES = 4, 1 << 23  # of a message dominated by latency, and of one dominated by bandwidth
LEAST_SHARE = 0.5  # least part of a large message's time that is for its bytes
LEAST_EXCHANGES, MOST_EXCHANGES = 2, 100  # of a round

Route = tuple[int, int]  # sender, receiver


@dataclass(frozen=True, slots=True)
class ExchangePhase:
    """Concurrent messages, while all other ranks are idle."""

    where: str  # ``inside HOST``, or ``HOST - HOST``
    how: str  # `ALONE`: one pair, there and back in turns; `AT_ONCE`: each rank sends to one and receives from one
    routes: tuple[Route, ...]


def phases(hosts: Sequence[str]) -> Iterator[ExchangePhase]:
    """What to measure between ranks, given their hosts: inside each, and between each and the next.

    One pair shows the link; all at once show what they share: a host's card, its bus, or its cores. Inside a host all at once is one step
    of
    a ring, as collectives are.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    for host, ranks in members.items():
        if len(ranks) > 1:
            yield ExchangePhase(f"inside {host}", ALONE, _both_ways(ranks[:1], ranks[1:]))
            yield ExchangePhase(f"inside {host}", AT_ONCE, (*pairwise(ranks), (ranks[-1], ranks[0])))
    for (host, here), (other, there) in pairwise(members.items()):
        yield ExchangePhase(f"{host} - {other}", ALONE, _both_ways(here[:1], there))
        yield ExchangePhase(f"{host} - {other}", AT_ONCE, _both_ways(here, there))


def _both_ways(here: Sequence[int], there: Sequence[int]) -> tuple[Route, ...]:
    return tuple(route for a, b in zip(here, there, strict=False) for route in ((a, b), (b, a)))


def link_samples(clock: RoundTimer, phase: ExchangePhase) -> Iterator[Samples]:
    """Measures one phase; every rank calls it, and those who send have samples: of one message, one way."""
    with clock.world.speaking(f"measuring messages, {phase.where}"):
        small, large = (exchange_rounds(clock, _call(clock.world, phase, num_bytes)) for num_bytes in (SMALL_BYTES, LARGE_BYTES))
    if not small:
        return
    messages = 2 if phase.how == ALONE else 1  # one after the other
    latencies = tuple(each / messages for each in small)
    usual = sorted(latencies)[len(latencies) // 2]
    rest = seconds_of_bytes([each / messages for each in large], usual)
    yield Samples(f"{LATENCY}, {phase.how}", "s", latencies)
    yield Samples.rates(f"{BANDWIDTH}, {phase.how}", "B/s", LARGE_BYTES - SMALL_BYTES, rest)


def seconds_of_bytes(large: Sequence[float], latency: float, least: float = LEAST_SHARE) -> list[float]:
    """Seconds of large messages without the known part.

    Args:
        large: seconds of each.
        latency: of small messages, or another known part; more than the rest of a large one is noise.
        least: the rest is at least this share of each.
    """
    return [max(each - latency, each * least) for each in large]


def exchange_rounds(clock: RoundTimer, call: Callable[[], None] | None, now: Callable[[], float] = time.perf_counter) -> tuple[float, ...]:
    """Seconds of an exchange in each round; all ranks make equally many, and as many untimed before each round.

    The untimed ones use up the burst that a rank with a share of a core has saved.

    Args:
        call: this rank's part; None if it has none.
        now: the clock of the samples; the number of exchanges is chosen by wall time.
    """
    first = clock.rounds(call, num_repeats=1, num_rounds=1)
    longest = max(float(each) for each in clock.world.gather_objects(max(first, default=1e-9)))  # type: ignore[arg-type]
    count = min(max(LEAST_EXCHANGES, math.ceil(clock.round_seconds / longest)), MOST_EXCHANGES)
    return replace(clock, now=now).rounds(call, num_repeats=count, num_before=count)


def _call(world: World, phase: ExchangePhase, num_bytes: int) -> Callable[[], None] | None:
    """This rank's part in the exchange; None if it has none."""
    target = next((b for a, b in phase.routes if a == world.rank), None)
    source = next((a for a, b in phase.routes if b == world.rank), None)
    if target is None or source is None:
        return None
    device = world.device if backend_of(world.device) is not None else torch.device("cpu")
    sent, received = (torch.zeros(num_bytes // 4, device=device) for _ in range(2))
    if phase.how == AT_ONCE:
        call = partial(_send_and_receive, sent, target, received, source)
    else:
        call = partial(_in_turns, sent, target, phase.routes[0][0] == world.rank)
    call()  # the first message opens the connection
    return call


def _in_turns(tensor: Tensor, peer: int, begins: bool) -> None:
    """There and back."""
    for sends in (begins, not begins):
        (dist.send if sends else dist.recv)(tensor, peer)


def _send_and_receive(sent: Tensor, target: int, received: Tensor, source: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, target), dist.P2POp(dist.irecv, received, source)]):
        work.wait()


HANDLING, HANDLED_BYTES = "handling of a message", "handling of bytes"
SMALL_SUM, LARGE_SUM = 1 << 20, 1 << 24  # of a sum: as in a split group, and about a bucket of gradients
PERIODS = 0.1  # compute seconds that show a rank's share of a core: some scheduler periods
SWEPT_BYTES = 1 << 22  # of each of the three tensors of an addition: about the caches of one core
LEAST_OF_SUM = 0.05  # least part of the sum in an addition and a sum, and of the messages in that: less is noise


def handling_samples(clock: RoundTimer) -> Iterator[Samples]:
    """Measures this rank's part in sums over all ranks (more than one); every rank, on a CPU, calls it."""
    world = clock.world
    with world.speaking("measuring the cost of messages on a rank"):
        share = _share_of_core(clock)
        tensors = (torch.zeros(size // 4) for size in (SMALL_SUM, LARGE_SUM))
        calls = (partial(_add_and_sum, *_swept(), tensor) for tensor in (None, *tensors))
        alone, *both = (exchange_rounds(clock, call, time.process_time) for call in calls)
    small, large = (seconds_of_bytes(each, median(alone), LEAST_OF_SUM) for each in both)
    count = 4 * (world.size - 1)  # messages around the ring and around again, each sent and received
    rest = [each / share for each in seconds_of_bytes(large, median(small))]
    of_small = median(rest) * share * SMALL_SUM / (LARGE_SUM - SMALL_SUM)
    yield Samples(HANDLING, "s", tuple(each / count / share for each in seconds_of_bytes(small, of_small, LEAST_OF_SUM)))
    yield Samples.rates(HANDLED_BYTES, "B/s", (LARGE_SUM - SMALL_SUM) * count / world.size, rest)


def _share_of_core(clock: RoundTimer) -> float:
    """The share of a core with which this rank computes while all do; an untimed run uses up its saved burst."""
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
