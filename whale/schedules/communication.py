"""Inserts communication into a schedule, with all launches (of messages and collectives) in one global order.

    an edge 0 -> 1 between ranks, plain recompute and early recompute on stage 0

    stage 0   F i, SEND_F i   ...                      RECV_B i, R i, B i     or    R i, RECV_B i, B i
    stage 1                   RECV_F i, F i, ... B i, SEND_B i

Launches are ordered by when they can happen if F, R, I and W take one unit of time, B two, and the network none; the
sum of the loss comes after the last forward of all. Each rank launches its part of that order, so both ends of a
communicator start its messages in the same order, and no two ranks wait for each other even if each launch blocks
until the other end has arrived:

    time      1         2         3         4         5
    rank 0    0F0       0F1                           0B0            >> SEND, << POST: 0SEND_F1 before 1POST_B0,
              >>F0      >>F1                <<B0                     on both ranks, because 0F1 ends before 1B0
    rank 1              1F0       1B0------ 1F1
              <<F0      <<F1                >>B0

Proof: take the earliest launch that has not happened. All launches before it have happened, so both of its ends can
compute up to it; both arrive, and it happens.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from whale.ir.schedule import COMMUNICATION, COMPUTE, RECEIVES, RECV_OF, SEND_OF, SENDS, Action, Kind, Schedule
from whale.schedules.execution import Edges, execute


def insert_communication(schedule: Schedule, edges: Iterable[tuple[int, int]], *, early: bool = True) -> Schedule:
    """Adds SEND, POST and RECV wherever an edge joins stages on different ranks, and the LOSS.

    RECV_F stands right before F, SEND_F right after it, SEND_B right after B or I (after the SYNC that follows it).
    RECV_B stands right before B or I, and before an R that directly precedes them, unless the builder put a RECV_B between
    the two (early recompute). A SEND_F carries all that its stage sends to other ranks, a RECV_F takes all that its stage
    needs from them. A POST starts to receive what one SEND sends to this rank; `insert_launches` places it.

    Args:
        schedule: with or without communication; existing communication is replaced, so the pass is idempotent.
        edges: pairs (source stage, target stage), source before target, skips included.
        early: whether messages travel during the computation before the one that needs them.
    """
    known = Edges.of(schedule, edges)
    into = frozenset(target for _, target in known.crossing())
    out_of = frozenset(source for source, _ in known.crossing())
    talking = replace(schedule, ranks=tuple(tuple(_insert(actions, into, out_of)) for actions in schedule.ranks))
    return insert_launches(talking, known, early=early)


def _insert(actions: tuple[Action, ...], into: frozenset[int], out_of: frozenset[int]) -> list[Action]:
    early = _early(actions)
    result: list[Action] = []
    for action in actions:
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        if kind in COMMUNICATION:
            continue
        if kind is Kind.FORWARD:
            if stage in into:
                result.append(Action(Kind.RECV_FORWARD, stage, micro_batch))
            result.append(action)
            if stage in out_of:
                result.append(Action(Kind.SEND_FORWARD, stage, micro_batch))
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            if stage in out_of:
                plain = bool(result) and result[-1] == Action(Kind.RECOMPUTE, stage, micro_batch) and (stage, micro_batch) not in early
                result.insert(len(result) - plain, Action(Kind.RECV_BACKWARD, stage, micro_batch))
            result.append(action)
            if stage in into:
                result.append(Action(Kind.SEND_BACKWARD, stage, micro_batch))
        elif kind is Kind.SYNC and result[-1].kind is Kind.SEND_BACKWARD and result[-1].stage == stage:
            result.insert(len(result) - 1, action)  # buckets start in the backward: no message starts among them
        else:
            result.append(action)
    return result


def _early(actions: tuple[Action, ...]) -> frozenset[tuple[int | None, int | None]]:
    """(stage, micro-batch) of each RECV_B that directly follows its R."""
    return frozenset(
        (action.stage, action.micro_batch)
        for before, action in pairwise(actions)
        if action.kind is Kind.RECV_BACKWARD
        and before.kind is Kind.RECOMPUTE
        and (before.stage, before.micro_batch) == (action.stage, action.micro_batch)
    )


When = tuple[float, bool, int, int]
"""Sort key of a launch: time, whether it is the loss (which comes after all launches of that time), stage and micro-batch."""

Key = tuple[Kind, int | None, int | None]
"""An action as a tuple, which hashes faster than an Action: there are tens of thousands."""

Arrivals = Mapping[Key, Sequence[Key]]

_SENDS_OF = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD, Kind.BACKWARD_INPUT: Kind.SEND_BACKWARD}
_POST_OF = {send: post for post, send in SEND_OF.items()}


def insert_launches(schedule: Schedule, edges: Edges, *, early: bool) -> Schedule:
    """Adds the POSTs and the LOSS.

    A POST stands one computation ahead of the one that needs it, so that the message travels meanwhile, or else right
    before its RECV; where the order of launches forbids that, as near to it as allowed. A LOSS stands as early as allowed.

    Args:
        schedule: with SENDs and RECVs, without POSTs and LOSS.
        edges: between its stages.
        early: whether POSTs stand one computation ahead.
    """
    made, last_forward = _made(schedule, edges)
    whens = {key: _when(key, made) for actions in schedule.ranks for action in actions if action.kind in SENDS for key in (_key(action),)}
    loss, arrivals = (last_forward, True, 0, 0), _arrivals(schedule, edges, whens)
    return replace(
        schedule,
        ranks=tuple(
            _with_posts(_with_loss(actions, whens, loss), whens, loss, arrivals[rank], early=early)
            for rank, actions in enumerate(schedule.ranks)
        ),
    )


def _key(action: Action) -> Key:
    return action.kind, action.stage, action.micro_batch


def _made(schedule: Schedule, edges: Edges) -> tuple[Mapping[Key, float], float]:
    """Per SEND the time at which its contents exist (absent for what a deadlock keeps from running); and the end of the last forward."""
    units = {kind: (2.0 if kind is Kind.BACKWARD else 1.0,) * schedule.num_stages for kind in COMPUTE}
    run, made, last_forward = execute(schedule, edges, durations=units), dict[Key, float](), 0.0
    for actions, ends in zip(schedule.ranks, run.ends, strict=True):
        for action, end in zip(actions, ends, strict=False):
            if action.kind in _SENDS_OF:
                made[_SENDS_OF[action.kind], action.stage, action.micro_batch] = end
            if action.kind is Kind.FORWARD:
                last_forward = max(last_forward, end)
    return made, last_forward


def _arrivals(schedule: Schedule, edges: Edges, whens: Mapping[Key, When]) -> tuple[Arrivals, ...]:
    """Per rank and message to it (identified by its SEND), the RECVs there that wait for it."""
    found = tuple(dict[Key, list[Key]]() for _ in schedule.ranks)
    for post, sender, receiver in edges.messages():
        here, send, receive = found[schedule.stage_rank[receiver]], SEND_OF[post], RECV_OF[post]
        for micro_batch in range(schedule.num_micro_batch):
            if (send, sender, micro_batch) in whens:
                here.setdefault((send, sender, micro_batch), []).append((receive, receiver, micro_batch))
    return found


def _when(send: Key, made: Mapping[Key, float]) -> When:
    _, stage, micro_batch = send
    return made.get(send, inf), False, stage or 0, micro_batch or 0


def _with_loss(actions: Sequence[Action], whens: Mapping[Key, When], loss: When) -> list[Action]:
    """Puts LOSS after the rank's own last forward and after all that it sends before the last forward anywhere ends."""
    place = 0
    for position, action in enumerate(actions):
        if action.kind is Kind.FORWARD or (action.kind in SENDS and whens[_key(action)] < loss):
            place = position + 1
    return [*actions[:place], Action(Kind.LOSS), *actions[place:]]


def _with_posts(actions: Sequence[Action], whens: Mapping[Key, When], loss: When, arrivals: Arrivals, *, early: bool) -> tuple[Action, ...]:
    """Puts each POST between its neighbours in the global order of launches."""
    position_of = {_key(action): position for position, action in enumerate(actions) if action.kind in RECEIVES}
    computations = [position for position, action in enumerate(actions) if action.kind in COMPUTE]
    fixed = [
        (loss if action.kind is Kind.LOSS else whens[_key(action)], position)
        for position, action in enumerate(actions)
        if action.kind in SENDS or action.kind is Kind.LOSS
    ]
    places = []
    latest = len(actions)
    for send in sorted(arrivals, key=whens.__getitem__, reverse=True):
        before = bisect(fixed, (whens[send], len(actions)))  # sends in program order are in the order of launches too
        lowest = fixed[before - 1][1] + 1 if before else 0
        highest = fixed[before][1] if before < len(fixed) else len(actions)
        taken = min((position_of[receive] for receive in arrivals[send] if receive in position_of), default=len(actions))
        in_front = bisect(computations, taken) - 1
        wanted = computations[in_front] if early and in_front >= 0 else taken
        latest = min(max(wanted, lowest), highest, taken, latest)
        kind, stage, micro_batch = send
        places.append((latest, Action(_POST_OF[kind], stage, micro_batch)))
    return _merged(actions, places[::-1])


def _merged(actions: Sequence[Action], places: Sequence[tuple[int, Action]]) -> tuple[Action, ...]:
    """Inserts actions at given positions; `places` is sorted."""
    result: list[Action] = []
    start = 0
    for place, post in places:
        result += [*actions[start:place], post]
        start = max(start, place)
    return (*result, *actions[start:])
