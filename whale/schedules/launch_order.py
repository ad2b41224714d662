"""The pass that puts everything that starts a message or a collective into one order, the same on all ranks.

What is launched, anywhere, is ordered by when it can be: a message by the end of the computation that makes it, if F, R,
I and W took one unit of time, B two, and the network none; the sum of the loss after the last forward of all. Each rank
launches its part of that order. So whatever shares a communicator is started in one order at both of its ends, and no
two ranks wait for each other, even if each launch waited until the other end has come to its own:

    time      1         2         3         4         5
    rank 0    0F0       0F1                           0B0            >> SEND, << POST: 0SEND_F1 before 1POST_B0,
              >>F0      >>F1                <<B0                     on both ranks, because 0F1 ends before 1B0
    rank 1              1F0       1B0------ 1F1
              <<F0      <<F1                >>B0

The argument: take the earliest launch that has not happened. Nothing launched before it is missing, so both of its
ends can compute up to it; they arrive, and it happens.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter

from whale.ir.schedule import COMPUTE, RECV_OF, SEND_OF, SENDS, Action, Kind, Schedule
from whale.schedules.edges import Edges
from whale.schedules.execution import execute

When = tuple[float, bool, int, int]
"""When something can be launched: a time, whether it is the loss (after all made until then), stage and micro-batch."""

Arrivals = Mapping[Action, Sequence[Action]]

_MADE_BY = {Kind.SEND_FORWARD: (Kind.FORWARD,), Kind.SEND_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
_POST_OF = {send: post for post, send in SEND_OF.items()}


def insert_launches(schedule: Schedule, edges: Edges) -> Schedule:
    """Adds the POSTs and the LOSS.

    A POST stands before the computation in front of the one that it is for, so that the message travels meanwhile,
    if the order of launches has it so; else earlier or later, as near as it may. A LOSS stands as early as it may.

    Args:
        schedule: with SENDs and RECVs, without POSTs and LOSS.
        edges: between its stages.
    """
    ends, arrivals = _ends(schedule, edges), _arrivals(schedule, edges)
    last_forward = max((end for action, end in ends.items() if action.kind is Kind.FORWARD), default=0.0)
    return replace(
        schedule,
        ranks=tuple(
            _with_posts(_with_loss(actions, ends, last_forward), ends, last_forward, arrivals[rank])
            for rank, actions in enumerate(schedule.ranks)
        ),
    )


def _ends(schedule: Schedule, edges: Edges) -> dict[Action, float]:
    """When each computation ends in units of time; those that a deadlock never lets run are left out."""
    units = {kind: (2.0 if kind is Kind.BACKWARD else 1.0,) * schedule.num_stages for kind in COMPUTE}
    run = execute(schedule, edges, durations=units)
    return {
        action: end
        for actions, ends in zip(schedule.ranks, run.ends, strict=True)
        for action, end in zip(actions, ends, strict=False)
        if action.kind in COMPUTE
    }


def _arrivals(schedule: Schedule, edges: Edges) -> tuple[Arrivals, ...]:
    """Per rank and message to it, by its SEND, the RECVs there that wait for it."""
    found = tuple(dict[Action, list[Action]]() for _ in schedule.ranks)
    sent = {action for actions in schedule.ranks for action in actions if action.kind in SENDS}
    for post, sender, receiver in edges.messages():
        for micro_batch in range(schedule.num_micro_batch):
            send = Action(SEND_OF[post], sender, micro_batch)
            if send in sent:
                here = found[schedule.stage_rank[receiver]]
                here.setdefault(send, []).append(Action(RECV_OF[post], receiver, micro_batch))
    return found


def _when(action: Action, ends: dict[Action, float]) -> When:
    made = [ends[maker] for kind in _MADE_BY[action.kind] if (maker := Action(kind, action.stage, action.micro_batch)) in ends]
    return max(made, default=inf), False, action.stage or 0, action.micro_batch or 0


def _with_loss(actions: Sequence[Action], ends: dict[Action, float], last_forward: float) -> list[Action]:
    """Puts LOSS behind the rank's own last forward and behind all that it sends before the last forward anywhere ends."""
    place = 0
    for position, action in enumerate(actions):
        if action.kind is Kind.FORWARD or (action.kind in SENDS and _when(action, ends) < (last_forward, True, 0, 0)):
            place = position + 1
    return [*actions[:place], Action(Kind.LOSS), *actions[place:]]


def _with_posts(actions: Sequence[Action], ends: dict[Action, float], last_forward: float, arrivals: Arrivals) -> tuple[Action, ...]:
    """Puts each POST between the launches before and after it in the order of all."""
    position_of = {action: position for position, action in enumerate(actions)}
    computations = [position for position, action in enumerate(actions) if action.kind in COMPUTE]
    fixed = [
        ((last_forward, True, 0, 0) if action.kind is Kind.LOSS else _when(action, ends), position)
        for position, action in enumerate(actions)
        if action.kind in SENDS or action.kind is Kind.LOSS
    ]
    order = sorted(((_when(send, ends), send) for send in arrivals), key=itemgetter(0))
    places = []
    latest = len(actions)
    for when, send in reversed(order):
        before = bisect(fixed, (when, len(actions)))  # sends in program order are in the order of launches too
        lowest = fixed[before - 1][1] + 1 if before else 0
        highest = fixed[before][1] if before < len(fixed) else len(actions)
        taken = min((position_of[receive] for receive in arrivals[send] if receive in position_of), default=len(actions))
        in_front = bisect(computations, taken) - 1
        wanted = computations[in_front] if in_front >= 0 else taken
        latest = min(max(wanted, lowest), highest, taken, latest)
        places.append((latest, Action(_POST_OF[send.kind], send.stage, send.micro_batch)))
    return _merged(actions, places[::-1])


def _merged(actions: Sequence[Action], places: Sequence[tuple[int, Action]]) -> tuple[Action, ...]:
    """Actions with others put in front of given positions; `places` is in order."""
    result: list[Action] = []
    start = 0
    for place, post in places:
        result += [*actions[start:place], post]
        start = max(start, place)
    return (*result, *actions[start:])
