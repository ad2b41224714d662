"""The pass that inserts communication: what every stage receives before, and sends after, its computations, and when it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from whale.ir.schedule import COMMUNICATION, Action, Kind, Schedule
from whale.schedules.edges import Edges
from whale.schedules.launch_order import insert_launches

# An edge 0 -> 1 between ranks, plain recompute and early recompute on stage 0:
#
#   stage 0   F i, SEND_F i   ...                      RECV_B i, R i, B i     or    R i, RECV_B i, B i
#   stage 1                   RECV_F i, F i, ... B i, SEND_B i


def insert_communication(schedule: Schedule, edges: Iterable[tuple[int, int]]) -> Schedule:
    """Adds SEND, POST and RECV wherever an edge joins stages on different ranks, and the LOSS.

    RECV_F stands right before F, SEND_F right after it, SEND_B right after B or I (after the SYNC that follows it).
    RECV_B stands right before B or I; where R comes directly before B it stands before R (plain order), unless the
    builder put a RECV_B between the two, which stays there (early recompute). A SEND_F hands over all that its stage
    sends to other ranks, a RECV_F takes all that its stage needs from other ranks; SEND_B and RECV_B likewise,
    backwards. A POST starts to receive what one SEND hands over to the rank; `insert_launches` says where it stands.

    Args:
        schedule: with or without communication; what is there is replaced, so the pass may be repeated.
        edges: pairs (source stage, target stage), source before target, skips included.
    """
    known = Edges.of(schedule, edges)
    into = frozenset(target for _, target in known.crossing())
    out_of = frozenset(source for source, _ in known.crossing())
    talking = replace(schedule, ranks=tuple(tuple(_insert(actions, into, out_of)) for actions in schedule.ranks))
    return insert_launches(talking, known)


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
