"""The run of a schedule alone, over given durations (no cluster, no bytes), and its bubbles.

The actions of a rank become its computations, each with what it waits for and what it sets off:

0RECV_F2 0F2 0SEND_F2 ... 0RECV_B2 0B2 0SYNC STEP
|        |   |
receives |   sends
         computation
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf

from whale.errors import ConfigError, ScheduleError, raise_faults
from whale.estimate.events.engine import Task, Transfer, run
from whale.ir.schedule import COMPUTE, POSTS, RECEIVES, SENDS, Action, Kind, Schedule
from whale.ir.timeline import Span, Timeline
from whale.schedules import Edges, count_in_flight, insert_communication

Times = float | Sequence[float]  # one figure for all stages, or one for each


@dataclass(frozen=True)
class ActionTimes:
    """Durations in one unit of the caller's choice (seconds, as a rule), each for one micro-batch of one stage.

    Attributes:
        forward: of F.
        backward_input: of I; the whole backward B takes this and `backward_weight`.
        backward_weight: of W.
        recompute: of R.
        sync: of SYNC, the synchronisation of one stage's gradients, once per step.
        transfer: latency of a hop between ranks; it occupies no device.
    """

    forward: Times
    backward_input: Times
    backward_weight: Times = 0.0
    recompute: Times = 0.0
    sync: Times = 0.0
    transfer: float = 0.0

    def durations(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """Per kind of action, the duration per stage.

        Raises:
            ConfigError: a list of figures of another length, or a figure that is negative or not finite.
        """
        self._check(num_stages)
        forward, inputs, weights, recompute, sync = (
            _per_stage(times, num_stages) for times in (self.forward, self.backward_input, self.backward_weight, self.recompute, self.sync)
        )
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: tuple(i + w for i, w in zip(inputs, weights, strict=True)),
            Kind.BACKWARD_INPUT: inputs,
            Kind.BACKWARD_WEIGHT: weights,
            Kind.RECOMPUTE: recompute,
            Kind.SYNC: sync,
        }

    def _check(self, num_stages: int) -> None:
        faults = []
        for each in fields(self):
            times = getattr(self, each.name)
            figures = tuple(times) if isinstance(times, Sequence) else (times,)
            if isinstance(times, Sequence) and len(times) != num_stages:
                faults.append(ConfigError(f"{each.name} has {len(times)} figures for {num_stages} stages; give one, or one per stage"))
            faults += [ConfigError(f"{each.name}: time {time:g} is negative or not finite") for time in figures if not 0 <= time < inf]
        raise_faults(faults)


def _per_stage(times: Times, num_stages: int) -> tuple[float, ...]:
    return tuple(times) if isinstance(times, Sequence) else (times,) * num_stages


@dataclass
class Computation:
    """A computation, or the STEP at the end.

    Attributes:
        action: what is done.
        posts: receives that are started before it.
        receives: receives that are waited for before it.
        sends: sends that stand behind it.
        synced: stages whose gradients are final after it.
    """

    action: Action
    posts: list[Action] = field(default_factory=list)
    receives: list[Action] = field(default_factory=list)
    sends: list[Action] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)


def computations(actions: Iterable[Action]) -> list[Computation]:
    """The computations of a rank in order."""
    found: list[Computation] = []
    posts, receives = list[Action](), list[Action]()
    for action in actions:
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            found.append(Computation(action, posts, receives))
            posts, receives = [], []
        elif action.kind in POSTS:
            posts.append(action)
        elif action.kind in RECEIVES:
            receives.append(action)
        elif action.kind in SENDS:
            found[-1].sends.append(action)
        elif action.kind is Kind.SYNC:
            assert action.stage is not None
            found[-1].synced.append(action.stage)
    return found


def bubble(timeline: Timeline) -> float:
    """Idle time of the rank whose computations span longest, from its first start to its last end."""
    spans = _longest(timeline)
    return _length(spans) - sum(span.end - span.start for span in spans)


def bubble_rate(timeline: Timeline) -> float:
    """`bubble` as a share of that rank's span; 0 where nothing takes time."""
    length = _length(_longest(timeline))
    return bubble(timeline) / length if length else 0.0


def _longest(timeline: Timeline) -> tuple[Span, ...]:
    return max(timeline.ranks, key=_length, default=())


def _length(spans: tuple[Span, ...]) -> float:
    return spans[-1].end - spans[0].start if spans else 0.0


_BACKWARD = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
_BACKWARD_MESSAGES = frozenset({Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})


def simulate(schedule: Schedule, costs: ActionTimes, edges: Iterable[tuple[int, int]] | None = None) -> Timeline:
    """Runs every rank's actions as early as their order and their inputs allow.

    A rank computes one action at a time. What crosses ranks arrives `ActionTimes.transfer` later and occupies nobody.
    The gradients of a stage go on the rank's network at its SYNC; the network serves one stage at a time.

    Args:
        schedule: verified; with or without communication.
        costs: durations of the actions of its stages.
        edges: pairs of stages; None for the chain in which every stage feeds the next.

    Raises:
        ScheduleError: the schedule would deadlock.
        ConfigError: durations for another number of stages.
    """
    durations = costs.durations(schedule.num_stages)
    pairs = Edges.of(schedule, edges)
    if all(action.kind not in SENDS for actions in schedule.ranks for action in actions):
        schedule = insert_communication(schedule, pairs.pairs)
    wires = _Wires(pairs, schedule, costs.transfer, durations[Kind.SYNC])
    ranks = [[each for each in computations(actions) if each.action.kind is not Kind.STEP] for actions in schedule.ranks]
    tasks = [[wires.task(each, durations) for each in rank] for rank in ranks]
    found = run(tasks, wires.transfers, ())
    if found.stuck:
        first = found.stuck[0]
        raise ScheduleError(
            f"deadlock: {ranks[first.worker][first.task].action} on rank {first.worker} waits for {wires.made_by[first.transfer]}",
            hint="verify the schedule first",
        )
    spans = tuple(
        tuple(Span(each.action, start, end) for each, (start, end) in zip(rank, times, strict=True))
        for rank, times in zip(ranks, found.tasks, strict=True)
    )
    syncs = tuple(
        tuple(Span(Action(Kind.SYNC, stage), *found.transfers[wires.syncs[stage]]) for each in rank for stage in each.synced)
        for rank in ranks
    )
    return Timeline(spans, count_in_flight(schedule), _exposed(spans, syncs), syncs)


class _Wires:
    """What crosses stages, as transfers: per direction, pair of stages and micro-batch one, and one per SYNC.

    Attributes:
        transfers: all of them.
        made_by: per transfer, the action whose end it waits for.
        syncs: per stage, the transfer of its SYNC.
    """

    def __init__(self, edges: Edges, schedule: Schedule, latency: float, sync: Sequence[float]) -> None:
        self.transfers: list[Transfer] = []
        self.made_by: list[Action] = []
        self.syncs: dict[int, int] = {}
        self._into: dict[tuple[bool, bool, int], list[int]] = {}  # by direction, whether it crosses ranks, and stage
        self._out_of: dict[tuple[bool, bool, int], list[int]] = {}
        for is_backward in (False, True):
            for pair in edges.pairs:
                source, target = reversed(pair) if is_backward else pair
                crosses = edges.stage_rank[source] != edges.stage_rank[target]
                self._out_of.setdefault((is_backward, crosses, source), []).append(len(self.transfers))
                self._into.setdefault((is_backward, crosses, target), []).append(len(self.transfers))
                self.transfers += [Transfer(0.0, latency if crosses else 0.0, 1)] * schedule.num_micro_batch
                kind = Kind.BACKWARD if is_backward else Kind.FORWARD
                self.made_by += [Action(kind, source, micro_batch) for micro_batch in range(schedule.num_micro_batch)]
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                if action.kind is Kind.SYNC and action.stage is not None:
                    self.syncs[action.stage] = len(self.transfers)
                    self.transfers.append(Transfer(0.0, sync[action.stage], 1, queue=rank))
                    self.made_by.append(action)

    def task(self, computation: Computation, durations: Mapping[Kind, Sequence[float]]) -> Task:
        """A computation with all that it waits for and sets off."""
        kind, stage, micro_batch = computation.action.kind, computation.action.stage, computation.action.micro_batch
        assert stage is not None and micro_batch is not None
        needs, sends = [], []
        if kind is Kind.FORWARD or kind in _BACKWARD:
            here = kind in _BACKWARD, False, stage
            needs += [first + micro_batch for first in self._into.get(here, ())]
            sends += [first + micro_batch for first in self._out_of.get(here, ())]
        for actions, ends, found in ((computation.receives, self._into, needs), (computation.sends, self._out_of, sends)):
            for action in actions:
                assert action.stage is not None and action.micro_batch is not None
                place = action.kind in _BACKWARD_MESSAGES, True, action.stage
                found += [first + action.micro_batch for first in ends.get(place, ())]
        sends += [self.syncs[synced] for synced in computation.synced]
        return Task(durations[kind][stage], tuple(needs), sends=tuple(sends))


def _exposed(ranks: tuple[tuple[Span, ...], ...], syncs: tuple[tuple[Span, ...], ...]) -> float:
    computed, synced = (max((spans[-1].end for spans in kind if spans), default=0.0) for kind in (ranks, syncs))
    return max(0.0, synced - computed)
