"""The schedules of a plan: one per replica, built once for each distinct pipeline.

A builder knows ranks' places in the pipeline. Consecutive colocated stages on one virtual device share a place:

    place       0F0             0B0
    stages      0F0 1F0         1B0 0B0         stages 0 and 1 run at place 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from whale.errors import ScheduleError
from whale.ir.plan import Pipeline, Plan, Replica
from whale.ir.schedule import Action, Kind, Schedule
from whale.schedules.communication import insert_communication
from whale.schedules.holding import count_in_flight
from whale.schedules.orders import forward_only, with_sync_and_step
from whale.schedules.recomputing import recompute_only
from whale.schedules.table import build
from whale.schedules.verify import verify

Pairs = tuple[tuple[int, int], ...]
"""Edges as pairs of stages, sorted."""

NUM_KEPT = 16  # a plan is estimated, verified and run by the same schedules; a search's plans share some


def schedules_of(plan: Plan) -> tuple[Schedule, ...]:
    """Per replica the schedule of its pipeline, with communication, verified; equal pipelines share one.

    Raises:
        ConfigError: a schedule cannot be built in this shape.
        ScheduleError: it is incomplete or deadlocks.
    """
    return _per_replica(plan, training_schedule)


def short_schedules_of(plan: Plan, whole: Plan) -> tuple[Schedule, ...]:
    """Per replica its training schedule without the last micro-batches, verified.

    Any schedule can be cut like this, also one that can only be built for some numbers of micro-batches.

    Of a replica without micro-batches, the schedule of one, which nobody runs.

    Args:
        plan: with the micro-batches that are left.
        whole: the same pipelines with all their micro-batches.

    Raises:
        ConfigError, ScheduleError: as `schedules_of`.
    """
    return tuple(
        _short_schedule(all_of.pipeline, edge_pairs(replica), max(1, replica.pipeline.num_micro_batch))
        for replica, all_of in zip(plan.replicas, whole.replicas, strict=True)
    )


def forward_schedules_of(plan: Plan) -> tuple[Schedule, ...]:
    """Per replica its forward passes alone, with communication, verified: for evaluation and prediction.

    Of a replica without micro-batches, the schedule of one, which nobody runs.
    """
    return _per_replica(plan, _forward_schedule)


@lru_cache(maxsize=NUM_KEPT)
def training_schedule(pipeline: Pipeline, pairs: Pairs) -> Schedule:
    """The schedule of one pipeline with edges `pairs`."""
    stage_rank = pipeline.stage_rank
    order = build(
        pipeline.schedule,
        num_ranks=pipeline.num_ranks,
        num_micro_batch=pipeline.num_micro_batch,
        num_chunks=pipeline.num_chunks,
        group_size=pipeline.group_size,
    )
    if order.stage_rank != stage_rank:  # colocated stages share a place
        _check_places(pipeline, order)
        order = expand(order, stage_rank)
    if pipeline.recomputed_stages:
        order = recompute_only(order, pipeline.recomputed_stages)
    schedule = insert_communication(order, pairs, early=pipeline.receive_early)
    verify(schedule, pairs)
    return schedule


@lru_cache(maxsize=NUM_KEPT)
def _short_schedule(pipeline: Pipeline, pairs: Pairs, num_micro_batch: int) -> Schedule:
    schedule = training_schedule(pipeline, pairs)
    if num_micro_batch == schedule.num_micro_batch:
        return schedule
    short = leave_out(schedule, pairs, num_micro_batch, early=pipeline.receive_early)
    verify(short, pairs)
    return short


def leave_out(schedule: Schedule, pairs: Pairs, num_micro_batch: int, *, early: bool = True) -> Schedule:
    """A training schedule with communication, cut to its first micro-batches, in the same order; `early` as for `insert_communication`."""
    left = (
        with_sync_and_step(action for action in actions if action.micro_batch is not None and action.micro_batch < num_micro_batch)
        for actions in schedule.ranks
    )
    short = replace(schedule, num_micro_batch=num_micro_batch, ranks=tuple(left), peak_in_flight=())
    return insert_communication(short, pairs, early=early)


def _check_places(pipeline: Pipeline, order: Schedule) -> None:
    found = tuple(pipeline.stage_rank[stages[0]] for stages in places(pipeline.stage_rank))
    if found != order.stage_rank:
        raise ScheduleError(
            f"stages of the pipeline are on virtual devices {' '.join(map(str, pipeline.stage_rank))}; schedule {pipeline.schedule} needs "
            f"{' '.join(map(str, order.stage_rank))} for {order.num_ranks}"
        )


def edge_pairs(replica: Replica) -> Pairs:
    """The pairs of stages of a replica that an edge joins."""
    return tuple(sorted({(edge.source, edge.target) for edge in replica.edges}))


def alike_schedules(plan: Plan) -> tuple[int, ...]:
    """Per replica a number that replicas with equal schedules share, from 0 in order of first appearance."""
    numbers: dict[tuple[Pipeline, Pairs], int] = {}
    return tuple(numbers.setdefault((replica.pipeline, edge_pairs(replica)), len(numbers)) for replica in plan.replicas)


@lru_cache(maxsize=NUM_KEPT)
def _forward_schedule(pipeline: Pipeline, pairs: Pairs) -> Schedule:
    order = forward_only(pipeline.num_ranks, max(1, pipeline.num_micro_batch), pipeline.stage_rank)
    schedule = insert_communication(order, pairs, early=pipeline.receive_early)
    verify(schedule, pairs)
    return schedule


def _per_replica(plan: Plan, make: Callable[[Pipeline, Pairs], Schedule]) -> tuple[Schedule, ...]:
    return tuple(make(replica.pipeline, edge_pairs(replica)) for replica in plan.replicas)


def places(stage_rank: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Runs of consecutive stages on one rank."""
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
