"""The pass that gives every stage of a virtual device its own actions where several TaskGraphs are colocated there.

A builder knows places in the pipeline. Two stages on one virtual device, in a row, are one place to it:

    place       0F0             0B0
    stages      0F0 1F0         1B0 0B0         stages 0 and 1 run at place 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from whale.ir.schedule import Action, Kind, Schedule
from whale.schedules.in_flight import count_in_flight
from whale.schedules.orders.builder import with_sync_and_step


def places(stage_rank: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The stages of each place: runs of stages on one rank."""
    return tuple(tuple(stage for stage, _ in run) for _, run in groupby(enumerate(stage_rank), key=lambda item: item[1]))


def expand(schedule: Schedule, stage_rank: Sequence[int]) -> Schedule:
    """Replaces places by their stages.

    Args:
        schedule: over places, without communication.
        stage_rank: per stage, its rank; as many runs as the schedule has stages.
    """
    stages = places(stage_rank)
    assert len(stages) == schedule.num_stages, (stages, schedule.stage_rank)
    ranks = tuple(with_sync_and_step(_expand(actions, stages)) for actions in schedule.ranks)
    expanded = replace(schedule, stage_rank=tuple(stage_rank), ranks=ranks)
    return replace(expanded, peak_in_flight=count_in_flight(expanded))


def _expand(actions: Sequence[Action], stages: Sequence[tuple[int, ...]]) -> Iterator[Action]:
    for action in actions:
        if action.stage is None or action.kind is Kind.SYNC:
            continue  # each stage has its own, right after its last backward
        if action.kind is Kind.FORWARD:
            yield from (replace(action, stage=stage) for stage in stages[action.stage])
        elif action.kind is Kind.RECV_BACKWARD:  # marks a recomputation that waits for no gradient
            yield replace(action, stage=stages[action.stage][-1])
        else:
            yield from (replace(action, stage=stage) for stage in reversed(stages[action.stage]))
