"""What a schedule holds: how many activations are alive, and until when a rank keeps what it sent.

    rank 0   0SEND_F0 ...................... 0RECV_B0       B0 has arrived, so rank 1 had taken F0 before it sent B0:
    rank 1             1RECV_F0 ... 1SEND_B0                0SEND_F0 is done

Not every network reports that a send is done without waiting for it. Once an answer that the peer sent after taking
the message has arrived, waiting for the send returns at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter

from whale.ir.schedule import RECEIVES, RECV_OF, SEND_OF, SENDS, Action, Kind, Schedule
from whale.schedules.execution import Edges


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most chunk activations alive at once; 0 without backward passes, which keep nothing."""
    return tuple(_peak(actions) for actions in schedule.ranks)


def count_recomputed(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most recomputed activations alive at once, from R to the last of B or W."""
    alive, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for action in (action for actions in schedule.ranks for action in actions if action.stage is not None):
        stage = action.stage
        assert stage is not None
        if action.kind is Kind.RECOMPUTE:
            alive[stage] += 1
            peak[stage] = max(peak[stage], alive[stage])
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            alive[stage] -= 1
    return tuple(peak)


def _peak(actions: tuple[Action, ...]) -> int:
    alive = peak = 0
    freed = False
    for action in actions:
        kind = action.kind
        if kind is Kind.FORWARD:
            alive += 1
            if alive > peak:
                peak = alive
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:
            alive -= 1
            freed = True
    return peak if freed else 0


Releases = dict[tuple[Action, int], tuple[Action, ...]]
"""Per RECV of a rank and per peer: the SENDs to that peer that are known to be done then."""


def releases(schedule: Schedule, edges: Edges, rank: int) -> Releases:
    """The SENDs of a rank that are known to be done at each of its RECVs, each at the earliest; those never known are absent.

    Args:
        schedule: with communication.
        edges: between its stages.
        rank: the sender.
    """
    found: dict[tuple[Action, int], list[Action]] = {}
    ends = {(schedule.stage_rank[sender], schedule.stage_rank[receiver]) for _, sender, receiver in edges.messages()}
    positions = {each: _positions(schedule, each) for each in sorted({end for both in ends if rank in both for end in both})}
    for peer in (each for each in positions if each != rank):
        sent, heard = _messages(schedule, edges, rank, peer, positions), _messages(schedule, edges, peer, rank, positions)
        for receive, done in _by_answer(sent, heard):
            found.setdefault((receive, peer), []).append(done)
    return {place: tuple(done) for place, done in found.items()}


Message = tuple[int, int, int, Action, Action]
"""Position of its SEND, positions of the last and of the first RECV that wait for it; the SEND, and the first RECV."""


Positions = Mapping[tuple[Kind, int], Mapping[int, int]]
"""Per (kind, stage) and micro-batch, the position of a message among the rank's actions."""


def _positions(schedule: Schedule, rank: int) -> Positions:
    found: dict[tuple[Kind, int], dict[int, int]] = {}
    for place, action in enumerate(schedule.ranks[rank]):
        if action.kind in SENDS or action.kind in RECEIVES:
            assert action.stage is not None and action.micro_batch is not None
            found.setdefault((action.kind, action.stage), {})[action.micro_batch] = place
    return found


def _messages(schedule: Schedule, edges: Edges, source: int, target: int, positions: Mapping[int, Positions]) -> Iterator[Message]:
    """Messages from one rank to another."""
    here, there = positions[source], positions[target]
    readers: dict[tuple[Kind, int], list[tuple[Kind, int]]] = {}
    for post, sender, receiver in edges.messages():
        if (schedule.stage_rank[sender], schedule.stage_rank[receiver]) == (source, target):
            readers.setdefault((SEND_OF[post], sender), []).append((RECV_OF[post], receiver))
    for send, receives in readers.items():
        for micro_batch, sent in sorted(here.get(send, {}).items()):
            places = [there[receive][micro_batch] for receive in receives]
            first, last = min(places), max(places)
            yield sent, last, first, schedule.ranks[source][sent], schedule.ranks[target][first]


def _by_answer(sent: Iterable[Message], heard: Iterable[Message]) -> Iterator[tuple[Action, Action]]:
    """Each message with the first RECV of an answer that its receiver sent after taking it."""
    sent_at: list[int] = []  # of answers, last first; with the first RECV of any sent at this place or later
    earliest: list[tuple[int, Action]] = []
    for at, _, first, _, receive in sorted(heard, key=itemgetter(0), reverse=True):
        sent_at.append(-at)
        earliest.append(min((first, receive), earliest[-1], key=itemgetter(0)) if earliest else (first, receive))
    for _, taken, _, send, _ in sent:
        number = bisect_left(sent_at, -taken)
        if number:
            yield earliest[number - 1][1], send
