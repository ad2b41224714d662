"""Measures the ranks of this run, their computing and their messages, as a cluster with the spread of each figure.

Figures are medians over equal devices, and over the messages between hosts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from whale.comm import World
from whale.hardware import CPU, DeviceProfile, catalogue, usual_host_link
from whale.ir.cluster import NO_HANDLING, Cluster, Device, Handling, Host, Link
from whale.ir.figure import Figure
from whale.measure.devices import gpu_notes, rank_profiles
from whale.measure.link_speed import ALONE, AT_ONCE, BANDWIDTH, HANDLED_BYTES, HANDLING, LATENCY, handling_samples, link_samples, phases
from whale.measure.samples import RoundTimer, Samples, pooled
from whale.units import counted


def probe(world: World, num_rounds: int, tell: Callable[[str], None]) -> tuple[Cluster, tuple[str, ...]]:
    """Measures all ranks; every rank calls it.

    Args:
        world: this process among its peers.
        num_rounds: samples of each thing.
        tell: is called with what is measured next.

    Returns:
        The cluster, and notes on each host, on every rank.

    Raises:
        RuntimeFault: a rank has left, or a wait timed out.
    """
    clock, profile = RoundTimer(world, num_rounds), rank_profiles(world)[world.rank]
    ranks = cast(list[tuple[str, int]], world.gather_objects((profile.host, os.getpid())))
    hosts, own = [host for host, _ in ranks], [process for host, process in ranks if host == profile.host]
    tell(f"the speed of {counted(world.size, 'rank')}, all at once")
    compute = list(compute_samples(clock))
    if len(set(hosts)) < world.size:  # the same on all ranks, which meet
        tell("the speed of one rank of each host, alone")
        compute.append(alone_samples(clock))
    messages = []
    for phase in phases(hosts):
        tell(f"messages {phase.where}, {phase.how}")
        messages += [(phase.where, samples) for samples in link_samples(clock, phase)]
    if world.size > 1 and world.device.type == "cpu":
        tell("the cost of messages on the ranks")
        compute += handling_samples(clock)
    notes = gpu_notes(own=own) if world.local_rank == 0 and world.device.type == "cuda" else ()
    report = Report(profile, tuple(compute), tuple(messages), tuple(f"{profile.host}: {note}" for note in notes))
    reports = [each for each in world.gather_objects(report) if isinstance(each, Report)]
    return probed_cluster(reports), tuple(note for each in reports for note in each.notes)


PRODUCTS = "products of"
MEMORY = "memory"
KERNEL_START = "start of a kernel"

DTYPES = ("float32", "bfloat16", "float16", "float64")
SIZES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}  # of the square matrices, by device type
LONGEST_PRODUCT = 0.1  # seconds after which larger products of a dtype are skipped
# bytes of each of the three tensors of an addition, or of all weights of an update: memory must be what is measured
BEYOND_CACHES = {"cpu": 1 << 24, "cuda": 1 << 28}
NUM_WEIGHTS = 8  # tensors of an update
NUM_STARTS = 200  # small ops of one call, over which the cost of starting one is averaged


def compute_samples(clock: RoundTimer) -> Iterator[Samples]:
    """Measures this rank's device while all ranks do the same, so that what they share (cores, memory) is shared as in a run."""
    kind = clock.world.device.type
    for dtype in DTYPES:
        yield from _products(clock, dtype, SIZES[kind])
    yield _memory(clock, BEYOND_CACHES[kind])
    small = torch.ones(1, device=clock.world.device, requires_grad=True)
    starts = clock.rounds(partial(_add_often, small), num_repeats=1)
    yield Samples(KERNEL_START, "s", tuple(each / NUM_STARTS for each in starts))


def alone_samples(clock: RoundTimer) -> Samples:
    """The largest float32 product on the host's first rank while the other ranks of the host are idle."""
    size = SIZES[clock.world.device.type][-1]
    measures = clock.world.local_rank == 0 and clock.world.local_size > 1
    call = _product("float32", size, clock.world.device) if measures else None
    seconds = clock.rounds(call)
    return Samples.rates(f"{PRODUCTS} float32, {size} x {size}, one rank alone", "FLOP/s", 2.0 * size**3, seconds)


def _memory(clock: RoundTimer, num_bytes: int) -> Samples:
    """The rate of an addition; on a CPU that of Adam's update, whose weights, gradients and two states count as read and written.

    A cache shared by cores may or may not hold what one addition reads: 48 MB took one of two equal ranks nearly twice the other's own
    time,
    while the update of their weights took both the same.
    """
    if clock.world.device.type == "cpu":
        weights = [nn.Parameter(torch.zeros(num_bytes // 4 // NUM_WEIGHTS)) for _ in range(NUM_WEIGHTS)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        return Samples.rates(MEMORY, "B/s", 2 * 4 * num_bytes, clock.rounds(torch.optim.AdamW(weights, fused=True).step))
    a, b, total = (torch.zeros(num_bytes // 4, device=clock.world.device) for _ in range(3))
    return Samples.rates(MEMORY, "B/s", 3 * num_bytes, clock.rounds(partial(torch.add, a, b, out=total)))


def _products(clock: RoundTimer, dtype: str, sizes: tuple[int, ...]) -> Iterator[Samples]:
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


NAME = "probed"
SHARED_BELOW = 0.9  # a card, or a link, is shared if all at once get less than this part of what each gets alone
# devices of one kind on one host are one group up to this ratio of their speeds, or if their samples overlap; a slower one, throttled or
# shared, is its own
ALIKE = 1.2


@dataclass(frozen=True)
class Report:
    """What one rank has measured."""

    profile: DeviceProfile  # its device
    compute: tuple[Samples, ...]  # speeds of that
    messages: tuple[tuple[str, Samples], ...] = ()  # that the rank sent, by where (``inside HOST``, ``HOST - HOST``)
    notes: tuple[str, ...] = ()  # on its host, in words

    @property
    def kind(self) -> str:
        return f"{self.profile.host} {self.profile.model}"

    @property
    def speed(self) -> Figure:
        """The fastest float32 product while all compute."""
        products = (each for each in self.compute if each.name.startswith(f"{PRODUCTS} float32") and not each.name.endswith(ALONE))
        return max((Figure.of(each.name, each.unit, each.values) for each in products), key=lambda figure: figure.value)


def probed_cluster(reports: Sequence[Report]) -> Cluster:
    """The cluster of the ranks, by rank, with all measured figures.

    Devices have their speeds while all compute at once, and links inside a host those while all send; if all together get no more than one
    pair alone, the link is that of the pair, and shared. Between hosts each device has the speed of one pair alone; if they share it, the
    total of all is the host's card.
    """
    groups = _groups(reports)
    compute = pooled((group, samples) for report, group in zip(reports, groups, strict=True) for samples in report.compute)
    messages = pooled(item for report in reports for item in report.messages)
    members: dict[str, list[Device]] = {}
    for report, group in zip(reports, groups, strict=True):
        devices = members.setdefault(report.profile.host, [])
        devices.append(_device(report, f"{report.profile.host}/{len(devices)}", compute[group]))
    hosts = tuple(
        Host(name, tuple(devices), _inside(name, devices, messages), _card(name, members, messages)) for name, devices in members.items()
    )
    between = [_link(figures, ALONE) for where, figures in messages.items() if not where.startswith("inside ")]
    network = Link.slowest(between) if between else None
    figures = (figure for found in (compute, messages) for each in found.values() for figure in each)
    return Cluster(NAME, hosts, network, measured=tuple(figures))


def _groups(reports: Sequence[Report]) -> list[str]:
    """Per report its group for pooling: devices of one kind on one host with similar speed; the fastest group has no number."""
    firsts: dict[str, list[Figure]] = {}
    groups = {}
    for index in sorted(range(len(reports)), key=lambda index: -reports[index].speed.value):
        kind, speed = reports[index].kind, reports[index].speed
        known = firsts.setdefault(kind, [])
        if not known or (known[-1].value > ALIKE * speed.value and known[-1].low > speed.high):
            known.append(speed)
        groups[index] = kind if len(known) == 1 else f"{kind}, slower {len(known) - 1}"
    return [groups[index] for index in range(len(reports))]


def _device(report: Report, name: str, figures: Sequence[Figure]) -> Device:
    flops: dict[str, float] = {}
    for figure in figures:
        _, _, what = figure.name.partition(f": {PRODUCTS} ")
        if what and not what.endswith(ALONE):
            dtype = what.partition(",")[0]
            flops[dtype] = max(flops.get(dtype, 0.0), figure.value)
    memory, start = (_value(figures, what) for what in (MEMORY, KERNEL_START))
    assert memory is not None and start is not None, "every rank measures them"
    profile, known = report.profile, catalogue().devices.get(report.profile.model)
    is_cpu = profile.model == CPU
    return Device(
        name,
        profile.host,
        profile.model,
        tuple(sorted(flops.items())),
        profile.memory,
        memory,
        kernel_start=start if is_cpu else None,
        half_width=known.half_width if known is not None else 0.0,
        host_seconds=0.0 if is_cpu else start,
        host_link=usual_host_link(profile.model),
        sharers=profile.sharers,
        handling=_handling(figures),
    )


def _handling(figures: Sequence[Figure]) -> Handling:
    seconds, rate = (_value(figures, what) for what in (HANDLING, HANDLED_BYTES))
    if seconds is None or rate is None:
        return NO_HANDLING
    return Handling(seconds, 1 / rate)


def _value(figures: Sequence[Figure], what: str) -> float | None:
    return next((figure.value for figure in figures if figure.name.endswith(f": {what}")), None)


def _link(figures: Sequence[Figure], how: str) -> Link:
    """The link as one pair alone has it, or all at once."""
    bandwidth, latency = (_value(figures, f"{what}, {how}") for what in (BANDWIDTH, LATENCY))
    assert bandwidth is not None and latency is not None, "a pair measures both"
    return Link(bandwidth, latency)


def _inside(host: str, devices: Sequence[Device], messages: Mapping[str, Sequence[Figure]]) -> Link:
    """As all at once have it; shared if together they get no more than one alone."""
    found = messages.get(f"inside {host}")
    if found is None:
        return Link(devices[0].bandwidth, 0.0)  # of a single device: nothing leaves it
    alone, together = _link(found, ALONE), _link(found, AT_ONCE)
    if len(devices) * together.bandwidth * SHARED_BELOW < alone.bandwidth:
        return Link(alone.bandwidth, together.latency, shared=True)
    return together


def _card(host: str, members: Mapping[str, Sequence[Device]], messages: Mapping[str, Sequence[Figure]]) -> float | None:
    """Bytes per second that the devices of a host share towards others; None if they do not share."""
    found = []
    for where, figures in messages.items():
        ends = where.split(" - ")
        alone, together = (_value(figures, f"{BANDWIDTH}, {how}") for how in (ALONE, AT_ONCE))
        if host in ends and alone is not None and together is not None and together < SHARED_BELOW * alone:
            found.append(together * min(len(members[end]) for end in ends))
    return min(found, default=None)
