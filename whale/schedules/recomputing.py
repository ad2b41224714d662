"""Recomputation: the pass that inserts R into any schedule, and orders in which some R overlap the transfer of gradients."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from functools import partial

from whale.ir.schedule import Action, Kind, Schedule
from whale.schedules.idle import in_turn as idle_in_turn
from whale.schedules.orders import Builder, ScheduleShape, in_turn, num_warm_up, peak_in_turn

# plain   RECV_B i, R i, B i       R runs while nothing else can: its time is on the critical path
# early   R i, RECV_B i, B i       R runs while the gradient is on its way


def insert_recompute(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """Adds R directly before every B or I that has none (plain order: RECV_B, R, B) of `stages`, all by default."""
    wanted = frozenset(range(schedule.num_stages) if stages is None else stages)
    return replace(schedule, ranks=tuple(tuple(before_backward(actions, wanted)) for actions in schedule.ranks))


def recompute_only(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """R for exactly these stages; an R that the schedule already has stays where it is."""
    wanted = frozenset(stages)
    ranks = ((each for each in actions if each.kind is not Kind.RECOMPUTE or each.stage in wanted) for actions in schedule.ranks)
    return insert_recompute(replace(schedule, ranks=tuple(map(tuple, ranks))), wanted)


def recomputes(schedule: Schedule) -> bool:
    return any(action.kind is Kind.RECOMPUTE for actions in schedule.ranks for action in actions)


def before_backward(
    actions: Iterable[Action], stages: Container[int | None], early: Container[tuple[int | None, int | None]] = ()
) -> Iterator[Action]:
    """Adds R before the B or I of some stages.

    Args:
        actions: of one rank.
        stages: that recompute.
        early: (stage, micro-batch) whose R runs before the gradient arrives, marked by a RECV_B after the R.
    """
    done = set()
    for action in actions:
        key = action.stage, action.micro_batch
        if action.kind is Kind.RECOMPUTE:
            done.add(key)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage in stages and key not in done:
            yield Action(Kind.RECOMPUTE, *key)
            if key in early:
                yield Action(Kind.RECV_BACKWARD, *key)
        yield action


# recompute_early: 1F1B in which the last p - 1 - s micro-batches of stage s are recomputed early. R as long as F, B twice as long: R2 and
# R3 of rank 0, R3 of rank 1 run while their gradients are on the way
#
# rank 0  F0 F1 F2                   R0 B0--- F3 R1 B1--- R2 B2--- R3 B3---
# rank 1     F0 F1          R0 B0--- F2 R1 B1--- F3 R2 B2--- R3 B3---
# rank 2        F0 R0 B0--- F1 R1 B1--- F2 R2 B2--- F3 R3 B3---
#
# last_no_recompute: the last stage, whose backward follows its forward at once, recomputes nothing
#
# rank 0  F0 F1 F2             R0 B0--- F3 R1 B1--- R2 B2--- R3 B3---
# rank 1     F0 F1 R0    B0--- F2 R1 B1--- F3 R2 B2--- R3 B3---
# rank 2        F0 B0--- F1 B1--- F2 B2---    F3 B3---
#
# shifted_critical_path: the stage before the last does one more forward ahead, to wait for no gradient, and holds one activation more
#
# rank 0  F0 F1 F2 R0          B0--- F3 R1 B1--- F4 R2 B2--- R3 B3--- R4 B4---
# rank 1     F0 F1 F2 R0 B0--- R1 B1--- F3 R2 B2--- F4 R3 B3--- R4 B4---
# rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---    F4 B4---


def _cool_down(shape: ScheduleShape, rank: int) -> set[tuple[int | None, int | None]]:
    """(stage, micro-batch) of the backwards after the last forward."""
    m = shape.num_micro_batch
    return {(rank, micro_batch) for micro_batch in range(m - num_warm_up(shape, rank), m)}


def _recompute_early(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    return before_backward(in_turn(shape, rank), (rank,), _cool_down(shape, rank))


def _last_no_recompute(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    last, early = shape.num_ranks - 1, _cool_down(shape, rank)
    if rank == last - 1:
        early.add((rank, 0))
    return before_backward(in_turn(shape, rank), () if rank == last else (rank,), early)


def _shifted_critical_path(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    last, early, actions = shape.num_ranks - 1, _cool_down(shape, rank), list(in_turn(shape, rank))
    if rank in (last - 1, last - 2):
        early.add((rank, 0))
    if _is_shifted(shape, rank):
        early.add((rank, 1))  # it follows B0 at once, and its gradient is a forward and a backward behind that of 0
        actions.insert(2, actions.pop(actions.index(Action(Kind.FORWARD, rank, 2))))
    return before_backward(actions, () if rank == last else (rank,), early)


def _is_shifted(shape: ScheduleShape, rank: int) -> bool:
    return rank == shape.num_ranks - 2 and shape.num_micro_batch > 2


def _peak_shifted(shape: ScheduleShape, rank: int) -> int:
    return peak_in_turn(shape, rank) + _is_shifted(shape, rank)


RECOMPUTE_EARLY = Builder("recompute_early", _recompute_early, peak_in_turn, idle=partial(idle_in_turn, sooner=0), tried=(1,))
LAST_NO_RECOMPUTE = Builder("last_no_recompute", _last_no_recompute, peak_in_turn, idle=partial(idle_in_turn, sooner=2), tried=(1,))
SHIFTED_CRITICAL_PATH = Builder(
    "shifted_critical_path", _shifted_critical_path, _peak_shifted, idle=partial(idle_in_turn, sooner=3), tried=(1,)
)
