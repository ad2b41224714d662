"""The proof that no two ranks wait for each other even where every launch waits until its other end has arrived.

On some networks a send returns at once (Gloo). On others (NCCL) the first use of a communicator, and a send without a
buffer, wait for the other end. The replay takes the strictest of all: a launch, be it a SEND, a POST or a LOSS, happens
when all who take part have come to it, and nobody passes it before. RECVs need no counting: what they wait for has then
happened at the POST.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whale.ir.schedule import POSTS, SEND_OF, SENDS, Action, Kind, Schedule

Launch = tuple[Kind, int | None, int | None]
"""Kind, stage and micro-batch of the sender's action; LOSS is one for all."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that stays at a launch for good.

    Attributes:
        rank: that stays.
        position: of the launch among its actions.
        absent: the ranks that never come to theirs.
    """

    rank: int
    position: int
    absent: tuple[int, ...]


def replay(schedule: Schedule) -> tuple[Blocked, ...]:
    """Runs the launches of all ranks; returns those that stay at one, none if the schedule is free of deadlock."""
    launches = [_launches(actions) for actions in schedule.ranks]
    parties = Counter(launch for own in launches for launch, _ in own)
    arrived: dict[Launch, list[int]] = {}
    at = [0] * len(launches)
    moving = list(range(len(launches)))
    while moving:
        rank = moving.pop()
        if at[rank] == len(launches[rank]):
            continue
        launch = launches[rank][at[rank]][0]
        here = arrived.setdefault(launch, [])
        here.append(rank)
        if len(here) == parties[launch]:
            for other in here:
                at[other] += 1
            moving += here
    return tuple(_blocked(launches, at))


def _launches(actions: Sequence[Action]) -> list[tuple[Launch, int]]:
    return [
        ((SEND_OF.get(action.kind, action.kind), action.stage, action.micro_batch), position)
        for position, action in enumerate(actions)
        if action.kind in SENDS or action.kind in POSTS or action.kind is Kind.LOSS
    ]


def _blocked(launches: Sequence[list[tuple[Launch, int]]], at: Sequence[int]) -> Iterator[Blocked]:
    for rank, own in enumerate(launches):
        if at[rank] < len(own):
            launch, position = own[at[rank]]
            absent = tuple(
                other
                for other, theirs in enumerate(launches)
                if other != rank and any(theirs[index][0] == launch for index in range(at[other] + 1, len(theirs)))
            )
            yield Blocked(rank, position, absent)
