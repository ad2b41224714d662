"""Proves that a schedule is complete, in order, free of deadlock, and within the peak memory it promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from whale.errors import ScheduleError, raise_faults
from whale.ir.schedule import Kind, Schedule
from whale.schedules.execution import Edges, execute, replay
from whale.schedules.faults import (
    Fault,
    bucket_faults,
    channel_faults,
    communication_faults,
    end_faults,
    locate,
    missing_computations,
    order_faults,
    post_faults,
)
from whale.schedules.holding import count_in_flight


def verify(schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None, *, places: Sequence[str] = ()) -> None:
    """Checks a schedule and reports all its faults at once.

    Every action once and on its stage's rank; F before R before B (or I before W); communication complete along the edges
    and in one order at both ends; SYNC and STEP at their ends; no deadlock, with non-blocking sends and with launches that
    block until the other end arrives; peak in flight as promised. Deadlocks are looked for only if nothing is missing or
    out of order, which would be reported twice.

    Args:
        schedule: with communication, or as a builder made it.
        edges: pairs of stages; communication along them is then required. None means a chain, and no communication is
            required of a schedule without any SEND.
        places: per rank, ``file:line`` of its actions, for the messages.

    Raises:
        ScheduleError: all the faults.
    """
    by_rank = sorted(_faults(schedule, edges), key=lambda fault: -1 if fault[0] is None else fault[0])
    raise_faults([ScheduleError(message, where=None if rank is None or rank >= len(places) else places[rank]) for rank, message in by_rank])


def _faults(schedule: Schedule, pairs: Iterable[tuple[int, int]] | None) -> list[Fault]:
    faults = list(_shape_faults(schedule))
    if faults:
        return faults
    edges = Edges.of(schedule, pairs)
    positions, faults = locate(schedule)
    faults += missing_computations(positions)
    communicates = pairs is not None or positions.any(Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    if communicates:
        faults += communication_faults(positions, edges)
    faults += order_faults(positions)
    faults += end_faults(positions, schedule)
    if communicates:
        faults += post_faults(positions, edges)
        faults += bucket_faults(positions, schedule)
    if faults:
        return faults
    if communicates:
        faults += channel_faults(positions, edges)
    deadlocks = list(_deadlocks(schedule, edges))
    if communicates and not faults and not deadlocks:
        deadlocks = list(_rendezvous_deadlocks(schedule))
    return [*faults, *deadlocks, *_broken_promises(schedule)]


def _shape_faults(schedule: Schedule) -> Iterator[Fault]:
    num_ranks = len(schedule.ranks)
    for stage, rank in enumerate(schedule.stage_rank):
        if rank >= num_ranks:
            yield None, f"stage {stage} is on rank {rank}, but there are {num_ranks} ranks"
    if schedule.num_micro_batch < 1 or not schedule.stage_rank:
        yield (
            None,
            f"the schedule has {schedule.num_micro_batch} micro-batches and {schedule.num_stages} stages; it needs at least 1 of each",
        )
    if schedule.peak_in_flight and len(schedule.peak_in_flight) != num_ranks:
        yield None, f"peak in flight has {len(schedule.peak_in_flight)} figures for {num_ranks} ranks"


def _deadlocks(schedule: Schedule, edges: Edges) -> Iterator[Fault]:
    stuck = execute(schedule, edges).stuck
    at = {fault.rank: schedule.ranks[fault.rank][fault.position] for fault in stuck}
    for fault in stuck:
        peer = schedule.stage_rank[fault.awaited.stage or 0]
        behind = f"which comes after {at[peer]} on rank {peer}, itself stuck" if peer in at else f"which rank {peer} never runs"
        if peer == fault.rank:
            behind = "which comes later on the same rank"
        action = f"{at[fault.rank]} (action {fault.position + 1} of rank {fault.rank})"
        yield fault.rank, f"deadlock: {action} waits for {fault.awaited}, {behind}"


def _rendezvous_deadlocks(schedule: Schedule) -> Iterator[Fault]:
    blocked = replay(schedule)
    at = {fault.rank: schedule.ranks[fault.rank][fault.position] for fault in blocked}
    for fault in blocked:
        action = f"{at[fault.rank]} (action {fault.position + 1} of rank {fault.rank})"
        behind = " and ".join(f"rank {rank}, which stays at {at[rank]}" for rank in fault.absent)
        yield fault.rank, f"deadlock where a launch waits for its other end: {action} waits for {behind}"


def _broken_promises(schedule: Schedule) -> Iterator[Fault]:
    for rank, (promised, found) in enumerate(zip(schedule.peak_in_flight, count_in_flight(schedule), strict=False)):
        if found > promised:
            yield rank, f"rank {rank} holds more activations at once than promised ({found}, promised {promised})"
