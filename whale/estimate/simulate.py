"""The discrete-event run of a schedule over the costs of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whale.errors import ScheduleError
from whale.estimate.action_times import ActionTimes
from whale.ir.schedule import COMPUTE, Action, Kind, Schedule
from whale.ir.timeline import Span, Timeline
from whale.schedules import Edges, count_in_flight, execute


def simulate(schedule: Schedule, costs: ActionTimes, edges: Iterable[tuple[int, int]] | None = None) -> Timeline:
    """Runs every rank's actions as early as their order and their inputs allow.

    A rank computes one action at a time. What crosses ranks arrives `ActionTimes.transfer` later and occupies nobody.
    The gradients of a stage go on the rank's network at its SYNC; the network serves one stage at a time.

    Args:
        schedule: verified; with or without communication.
        costs: of its stages.
        edges: pairs of stages; None for the chain in which every stage feeds the next.

    Raises:
        ScheduleError: the schedule would deadlock.
        ConfigError: costs for another number of stages.
    """
    durations = costs.durations(schedule.num_stages)
    on_device = {kind: times for kind, times in durations.items() if kind in COMPUTE}
    run = execute(schedule, Edges.of(schedule, edges), durations=on_device, latency=costs.transfer)
    if run.stuck:
        first = run.stuck[0]
        action = schedule.ranks[first.rank][first.position]
        raise ScheduleError(f"deadlock: {action} on rank {first.rank} waits for {first.awaited}", hint="verify the schedule first")
    ranks = tuple(
        tuple(Span(action, start, end) for action, start, end in zip(actions, starts, ends, strict=True) if action.kind in COMPUTE)
        for actions, starts, ends in zip(schedule.ranks, run.starts, run.ends, strict=True)
    )
    syncs = tuple(_syncs(actions, starts, durations[Kind.SYNC]) for actions, starts in zip(schedule.ranks, run.starts, strict=True))
    return Timeline(ranks, count_in_flight(schedule), _exposed(ranks, syncs), syncs)


def _syncs(actions: tuple[Action, ...], starts: list[float], durations: Sequence[float]) -> tuple[Span, ...]:
    """Each SYNC when its gradients are there and the network is free."""
    spans: list[Span] = []
    free = 0.0
    for action, ready in zip(actions, starts, strict=True):
        if action.kind is Kind.SYNC and action.stage is not None:
            start = max(ready, free)
            free = start + durations[action.stage]
            spans.append(Span(action, start, free))
    return tuple(spans)


def _exposed(ranks: tuple[tuple[Span, ...], ...], syncs: tuple[tuple[Span, ...], ...]) -> float:
    computed, synced = (max((spans[-1].end for spans in kind if spans), default=0.0) for kind in (ranks, syncs))
    return max(0.0, synced - computed)
