"""The run of a schedule alone, over given durations (no cluster, no bytes), and its bubbles.

The actions of a rank become its computations, each with what it waits for and what it sets off:

0RECV_F2 0F2 0SEND_F2 ... 0RECV_B2 0B2 0SYNC STEP
|        |   |
receives |   sends
         computation
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import inf

from whale.errors import ConfigError, ScheduleError, raise_faults
from whale.ir.schedule import COMPUTE, POSTS, RECEIVES, SENDS, Action, Kind, Schedule
from whale.ir.timeline import Span, Timeline
from whale.schedules import Edges, count_in_flight, execute

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
    sync = durations.pop(Kind.SYNC)
    found = execute(schedule, Edges.of(schedule, edges), durations=durations, latency=costs.transfer)
    if found.stuck:
        first = found.stuck[0]
        raise ScheduleError(
            f"deadlock: {schedule.ranks[first.rank][first.position]} on rank {first.rank} waits for {first.awaited}",
            hint="verify the schedule first",
        )
    ranks = [[Span(*each) for each in zip(*own, strict=True)] for own in zip(schedule.ranks, found.starts, found.ends, strict=True)]
    spans = tuple(tuple(span for span in own if span.action.kind in COMPUTE) for own in ranks)
    syncs = tuple(tuple(_syncs(own, sync)) for own in ranks)
    computed, synced = (max((own[-1].end for own in kind if own), default=0.0) for kind in (spans, syncs))
    return Timeline(spans, count_in_flight(schedule), max(0.0, synced - computed), syncs)


def _syncs(spans: Iterable[Span], seconds: Sequence[float]) -> Iterator[Span]:
    """The SYNC actions of a rank on its network, each behind the computation that it follows and behind one another."""
    computed, free = 0.0, 0.0
    for span in spans:
        if span.action.kind in COMPUTE:
            computed = span.end
        elif span.action.kind is Kind.SYNC:
            assert span.action.stage is not None
            start = max(computed, free)
            free = start + seconds[span.action.stage]
            yield Span(span.action, start, free)
