"""Runs a schedule on counters: every action at its earliest time, or stuck for good.

`execute`: sends never block; an action waits for what other ranks have not made yet. Without durations this proves
that the schedule ends; with them it gives times.

`replay`: every launch (SEND, POST, LOSS) blocks until all its participants have reached theirs. This is the strictest
network: a Gloo send returns at once, but the first use of an NCCL communicator and an unbuffered send block. RECVs
are not counted, because their message has then arrived at the POST.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale.errors import ScheduleError, raise_faults
from whale.ir.schedule import POSTS, SEND_OF, SENDS, Action, Kind, Schedule


@dataclass(frozen=True)
class Edges:
    """The edges between the stages of one schedule: sorted, distinct pairs (source, target)."""

    pairs: tuple[tuple[int, int], ...]
    stage_rank: tuple[int, ...]

    @staticmethod
    def of(schedule: Schedule, pairs: Iterable[tuple[int, int]] | None) -> Edges:
        """Edges of a schedule; `pairs` None means a chain in which every stage feeds the next.

        Raises:
            ScheduleError: an edge leads backwards, or from or to a stage that does not exist.
        """
        if pairs is None:
            pairs = ((stage, stage + 1) for stage in range(schedule.num_stages - 1))
        known = tuple(sorted(set(pairs)))
        raise_faults(
            [
                ScheduleError(f"edge {source} to {target} does not lead from a stage to a later one of {schedule.num_stages}")
                for source, target in known
                if not 0 <= source < target < schedule.num_stages
            ]
        )
        return Edges(known, schedule.stage_rank)

    def crossing(self) -> tuple[tuple[int, int], ...]:
        """Edges between stages on different ranks: those that need communication."""
        return tuple((source, target) for source, target in self.pairs if self.stage_rank[source] != self.stage_rank[target])

    def messages(self) -> Iterator[tuple[Kind, int, int]]:
        """Per edge between ranks and direction: the kind of its POST, the sending stage, the receiving stage."""
        for source, target in self.crossing():
            yield Kind.POST_FORWARD, source, target
            yield Kind.POST_BACKWARD, target, source

    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that it reads from."""
        found: list[list[int]] = [[] for _ in self.stage_rank]
        for source, target in self.pairs:
            found[target].append(source)
        return tuple(map(tuple, found))

    def targets(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that read from it."""
        found: list[list[int]] = [[] for _ in self.stage_rank]
        for source, target in self.pairs:
            found[source].append(target)
        return tuple(map(tuple, found))


Wait = tuple[int, float]  # where in the table of times to look (plus the micro-batch), and the delay on the way
Waits = list[list[Wait]]  # per stage

_SENDS = {Kind.SEND_FORWARD: Kind.FORWARD, Kind.SEND_BACKWARD: Kind.BACKWARD}


@dataclass(frozen=True, slots=True)
class StuckRank:
    """A rank that can never continue: the position of its action, and the action of another stage that it waits for."""

    rank: int
    position: int
    awaited: Action


@dataclass(frozen=True, slots=True)
class Execution:
    """When every action ran: per rank, for each action that ran."""

    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    stuck: tuple[StuckRank, ...]  # ranks that did not reach their end


class _Table:
    """Indices of events in one flat table of times: F, B, and separately SEND_F, SEND_B if there are sends."""

    def __init__(self, schedule: Schedule, edges: Edges, latency: float) -> None:
        self.num_micro_batch = schedule.num_micro_batch
        self.half = schedule.num_stages * schedule.num_micro_batch
        self.has_sends = any(action.kind in _SENDS for actions in schedule.ranks for action in actions)
        self.sent = 2 * self.half if self.has_sends else 0
        rank_of, m = schedule.stage_rank, self.num_micro_batch

        def waits(offset: int, peers: tuple[tuple[int, ...], ...]) -> Waits:
            return [
                [
                    (offset + peer * m, 0.0) if rank_of[peer] == rank_of[stage] else (self.sent + offset + peer * m, latency)
                    for peer in peers[stage]
                ]
                for stage in range(schedule.num_stages)
            ]

        self.forward = waits(0, edges.sources())
        self.backward = waits(self.half, edges.targets())
        self.nothing: Waits = [[] for _ in range(schedule.num_stages)]

    @property
    def size(self) -> int:
        return self.sent + 2 * self.half

    def rows(self, durations: Mapping[Kind, Sequence[float]]) -> dict[Kind, tuple[Waits, Sequence[float], int]]:
        """Per kind: what it waits for, its durations per stage, and where its end is written (-1: nowhere)."""
        zero = [0.0] * len(self.forward)
        nothing, half, sent = self.nothing, self.half, self.sent
        table = {
            Kind.FORWARD: (self.forward, 0),
            Kind.BACKWARD: (self.backward, half),
            Kind.BACKWARD_INPUT: (self.backward, half),
            Kind.BACKWARD_WEIGHT: (nothing, -1),
            Kind.RECOMPUTE: (nothing, -1),
            Kind.RECV_FORWARD: (self.forward, -1),
            Kind.RECV_BACKWARD: (self.backward, -1),
            Kind.POST_FORWARD: (nothing, -1),
            Kind.POST_BACKWARD: (nothing, -1),
            Kind.SEND_FORWARD: (nothing, sent),
            Kind.SEND_BACKWARD: (nothing, sent + half),
            Kind.SYNC: (nothing, -1),
        }
        return {kind: (waits, durations.get(kind, zero), offset) for kind, (waits, offset) in table.items()}

    def action(self, event: int) -> Action:
        """The action whose end is at this index."""
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        stage, micro_batch = divmod(event % self.half, self.num_micro_batch)
        return Action(kinds[event // self.half], stage, micro_batch)


def execute(
    schedule: Schedule, edges: Edges, *, durations: Mapping[Kind, Sequence[float]] | None = None, latency: float = 0.0
) -> Execution:
    """Runs a schedule that holds every action it needs.

    Args:
        schedule: with or without communication. Without, a result crosses ranks as soon as it exists and the consumer
            waits for it; an R directly before its B waits for the gradient as B does.
        edges: between its stages.
        durations: per kind, seconds of one action per stage; 0 for kinds that are absent.
        latency: from the end of F, B or I (of the SEND, where there are sends) to the arrival on another rank.
    """
    table = _Table(schedule, edges, latency)
    rows, backward, m = table.rows(durations or {}), table.backward, schedule.num_micro_batch
    times = [-1.0] * table.size
    starts: tuple[list[float], ...] = tuple([] for _ in schedule.ranks)
    ends: tuple[list[float], ...] = tuple([] for _ in schedule.ranks)
    clocks = [0.0] * len(schedule.ranks)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        actions, clock, started, ended = schedule.ranks[rank], clocks[rank], starts[rank], ends[rank]
        awaited = -1
        for position in range(len(ended), len(actions)):
            action = actions[position]
            kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
            if stage is None:
                started.append(clock)
                ended.append(clock)
                continue
            waits, lasts, offset = rows[kind]
            if kind is Kind.RECOMPUTE and _precedes_its_backward(actions, position):
                waits = backward
            for base, delay in waits[stage]:
                arrival = times[base + micro_batch]  # type: ignore[operator]
                if arrival < 0.0:
                    awaited = base + micro_batch  # type: ignore[operator]
                    break
                if arrival + delay > clock:
                    clock = arrival + delay
            if awaited >= 0:
                waiting.setdefault(awaited, []).append(rank)
                break
            started.append(clock)
            clock += lasts[stage]
            ended.append(clock)
            if offset >= 0:
                event = offset + stage * m + micro_batch  # type: ignore[operator]
                times[event] = clock
                if event in waiting:
                    ready.extend(waiting.pop(event))
        clocks[rank] = clock
    stuck = [StuckRank(rank, len(ends[rank]), table.action(event)) for event, ranks in waiting.items() for rank in ranks]
    return Execution(starts, ends, tuple(sorted(stuck, key=lambda fault: fault.rank)))


def _precedes_its_backward(actions: tuple[Action, ...], position: int) -> bool:
    if position + 1 == len(actions):
        return False
    action, after = actions[position], actions[position + 1]
    its_own = (after.stage, after.micro_batch) == (action.stage, action.micro_batch)
    return its_own and after.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)


Launch = tuple[Kind, int | None, int | None]
"""Kind, stage and micro-batch of the sender's action; LOSS is the same for all ranks."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank blocked forever at the launch at `position` of its actions, because ranks `absent` never reach it."""

    rank: int
    position: int
    absent: tuple[int, ...]


def replay(schedule: Schedule) -> tuple[Blocked, ...]:
    """Runs the launches of all ranks with blocking semantics; returns the ranks that stay blocked, () if there is no deadlock."""
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
