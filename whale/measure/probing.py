"""Measuring the ranks at hand: what each computes and what they send one another, as a cluster with the spread of each figure."""

from __future__ import annotations

from collections.abc import Callable

from whale.comm import World
from whale.ir.cluster import Cluster
from whale.measure.compute_speed import alone_samples, compute_samples
from whale.measure.devices import local_profile
from whale.measure.handling import handling_samples
from whale.measure.link_speed import link_samples, phases
from whale.measure.probed import Report, probed_cluster
from whale.measure.samples import Clock
from whale.measure.topology import gpu_notes
from whale.units import counted


def probe(world: World, num_rounds: int, tell: Callable[[str], None]) -> tuple[Cluster, tuple[str, ...]]:
    """Measures all ranks; every rank calls it.

    Args:
        world: this process among its peers.
        num_rounds: how often each thing is measured.
        tell: is called with what is measured next.

    Returns:
        The cluster, and what is known of each host in words, on every rank.

    Raises:
        RuntimeFault: a rank has left, or a wait was too long.
    """
    clock, profile = Clock(world, num_rounds), local_profile(world.local_rank, world.local_size)
    hosts = [str(host) for host in world.gather_objects(profile.host)]
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
        tell("what messages take of the ranks")
        compute += handling_samples(clock)
    notes = gpu_notes() if world.local_rank == 0 and world.device.type == "cuda" else ()
    report = Report(profile, tuple(compute), tuple(messages), tuple(f"{profile.host}: {note}" for note in notes))
    reports = [each for each in world.gather_objects(report) if isinstance(each, Report)]
    return probed_cluster(reports), tuple(note for each in reports for note in each.notes)
