"""How fast ranks send to one another: latency and bandwidth of a message, one pair alone and all pairs at once.

host a   0  1  2  3        alone inside     0-1            at once inside    0-1  2-3
host b   4  5  6  7        alone between    0-4            at once between   0-4  1-5  2-6  3-7
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import World, backend_of
from whale.measure.samples import Clock, Samples

ALONE, AT_ONCE = "alone", "all at once"
LATENCY, BANDWIDTH = "latency", "bandwidth"
SMALL_BYTES, LARGE_BYTES = 4, 1 << 23
"""Of a message whose bytes count little, and of one whose latency counts little."""
NUM_SMALL, NUM_LARGE = 10, 2
"""Exchanges of a round."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Pairs of ranks that exchange messages at the same time, while all others are idle.

    Attributes:
        where: ``inside HOST``, or ``HOST - HOST``.
        how: `ALONE` or `AT_ONCE`.
        pairs: of ranks.
    """

    where: str
    how: str
    pairs: tuple[tuple[int, int], ...]


def phases(hosts: Sequence[str]) -> Iterator[Phase]:
    """What to measure between ranks, given their hosts: inside each, and between each and the next.

    One pair says what the link gives; all pairs at once say what they share: a host's card, its bus, or its cores.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    for host, ranks in members.items():
        yield from _both(f"inside {host}", list(zip(ranks[::2], ranks[1::2], strict=False)))
    for (host, here), (other, there) in pairwise(members.items()):
        yield from _both(f"{host} - {other}", list(zip(here, there, strict=False)))


def _both(where: str, pairs: list[tuple[int, int]]) -> Iterator[Phase]:
    if pairs:
        yield Phase(where, ALONE, (pairs[0],))
    if len(pairs) > 1:
        yield Phase(where, AT_ONCE, tuple(pairs))


def link_samples(clock: Clock, phase: Phase) -> Iterator[Samples]:
    """Measures one phase; every rank calls it, and the first of each pair has samples."""
    with clock.world.speaking(f"measuring messages, {phase.where}"):
        peer = next((pair for pair in phase.pairs if clock.world.rank in pair), None)
        small = clock.rounds(_exchange(clock.world, peer, SMALL_BYTES), num_repeats=NUM_SMALL)
        large = clock.rounds(_exchange(clock.world, peer, LARGE_BYTES), num_repeats=NUM_LARGE)
    if peer is None or peer[0] != clock.world.rank:
        return
    latencies = tuple(each / 2 for each in small)
    usual = sorted(latencies)[len(latencies) // 2]
    rest = [max(each / 2 - usual, 1e-9) for each in large]
    yield Samples(f"{LATENCY}, {phase.how}", "s", latencies)
    yield Samples.rates(f"{BANDWIDTH}, {phase.how}", "B/s", LARGE_BYTES - SMALL_BYTES, rest)


def _exchange(world: World, pair: tuple[int, int] | None, num_bytes: int) -> Callable[[], None] | None:
    """There and back between this rank and its peer; None where it has none."""
    if pair is None:
        return None
    device = world.device if backend_of(world.device) is not None else torch.device("cpu")
    peer, tensor = sum(pair) - world.rank, torch.zeros(num_bytes // 4, device=device)
    call = partial(_there_and_back if world.rank == pair[0] else _back_and_there, peer, tensor)
    call()  # the first message opens the connection
    return call


def _there_and_back(peer: int, tensor: Tensor) -> None:
    dist.send(tensor, peer)
    dist.recv(tensor, peer)


def _back_and_there(peer: int, tensor: Tensor) -> None:
    dist.recv(tensor, peer)
    dist.send(tensor, peer)
