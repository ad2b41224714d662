"""The simulation of a bare schedule with given durations (no cluster, no bytes), and its bubbles.

The actions of a rank become computations, each with what it waits for and what it starts:

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
    """Durations of one micro-batch of one stage, in any one unit (usually seconds)."""

    forward: Times  # of F
    backward_input: Times  # of I; a whole B takes this and `backward_weight`
    backward_weight: Times = 0.0  # of W
    recompute: Times = 0.0  # of R
    sync: Times = 0.0  # of SYNC, the all-reduce of one stage's gradients, once per step
    transfer: float = 0.0  # latency of a hop between ranks; it occupies no device

    def durations(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """Per kind of action, the duration per stage.

        Raises:
            ConfigError: a list of another length, or a figure that is negative or not finite.
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
    """A computation, or the STEP at the end."""

    action: Action
    posts: list[Action] = field(default_factory=list)  # receives that start before it
    receives: list[Action] = field(default_factory=list)  # receives that must end before it
    sends: list[Action] = field(default_factory=list)  # sends after it
    synced: list[int] = field(default_factory=list)  # stages whose gradients are final after it


def computations(actions: Iterable[Action]) -> list[Computation]:
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
    """Idle time of the rank with the longest span of computations, from its first start to its last end."""
    spans = _longest(timeline)
    return _length(spans) - sum(span.end - span.start for span in spans)


def bubble_rate(timeline: Timeline) -> float:
    """`bubble` as a share of that span; 0 where nothing takes time."""
    length = _length(_longest(timeline))
    return bubble(timeline) / length if length else 0.0


def _longest(timeline: Timeline) -> tuple[Span, ...]:
    return max(timeline.ranks, key=_length, default=())


def _length(spans: tuple[Span, ...]) -> float:
    return spans[-1].end - spans[0].start if spans else 0.0


def simulate(schedule: Schedule, costs: ActionTimes, edges: Iterable[tuple[int, int]] | None = None) -> Timeline:
    """Runs every rank's actions as early as their order and inputs allow.

    A rank computes one action at a time. Results cross ranks in `ActionTimes.transfer` and occupy nobody. The gradients of
    a stage go on the rank's network at its SYNC, one stage at a time.

    Args:
        schedule: verified; with or without communication.
        costs: durations of the actions of its stages.
        edges: pairs of stages; None for a chain.

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
    """The SYNC actions of a rank on its network, each after its computation and after one another."""
    computed, free = 0.0, 0.0
    for span in spans:
        if span.action.kind in COMPUTE:
            computed = span.end
        elif span.action.kind is Kind.SYNC:
            assert span.action.stage is not None
            start = max(computed, free)
            free = start + seconds[span.action.stage]
            yield Span(span.action, start, free)
