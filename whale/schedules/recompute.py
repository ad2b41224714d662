"""The pass that inserts recomputation into a schedule: R right before the backward that needs it, the gradient at hand."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from whale.ir.schedule import Action, Kind, Schedule

# plain   RECV_B i, R i, B i       R runs while nothing else can: its time is on the critical path
# early   R i, RECV_B i, B i       R runs while the gradient is on its way


def insert_recompute(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """Adds R directly before every B or I that has none, which is the plain order: RECV_B, R, B.

    Args:
        schedule: with or without communication.
        stages: that recompute; all by default.
    """
    wanted = frozenset(range(schedule.num_stages) if stages is None else stages)
    return replace(schedule, ranks=tuple(tuple(before_backward(actions, wanted)) for actions in schedule.ranks))


def recompute_only(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """R before every B or I of these stages, and of no other, where it is if the schedule has one already.

    Args:
        schedule: with or without communication.
        stages: that recompute.
    """
    wanted = frozenset(stages)
    ranks = ((each for each in actions if each.kind is not Kind.RECOMPUTE or each.stage in wanted) for actions in schedule.ranks)
    return insert_recompute(replace(schedule, ranks=tuple(map(tuple, ranks))), wanted)


def recomputes(schedule: Schedule) -> bool:
    """Whether it has R actions."""
    return any(action.kind is Kind.RECOMPUTE for actions in schedule.ranks for action in actions)


def before_backward(
    actions: Iterable[Action], stages: Container[int | None], early: Container[tuple[int | None, int | None]] = ()
) -> Iterator[Action]:
    """Adds R before the B or I of some stages; a RECV_B between the two marks those whose R awaits no gradient.

    Args:
        actions: of one rank.
        stages: that recompute.
        early: (stage, micro-batch) whose R runs before the gradient is awaited.
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
