"""The predicted or measured times of a schedule's actions and of transfers between devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

from whale.ir.schedule import COMPUTE, Action, Kind


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end, in the unit of its costs (usually seconds)."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A named interval: a segment inside an action, or a wait that is no action (``gradients``)."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors sent from one device to another."""

    name: str  # the stages and the micro-batch: ``0 -> 1 F3``
    source: str  # device, as `target`
    target: str
    num_bytes: float  # of all tensors together
    start: float  # seconds, when both ends are ready
    end: float  # seconds, when all has arrived


@dataclass(frozen=True, slots=True)
class Sync:
    """A bucket of gradients that its owners sum, or of weights that keepers send to the other owners."""

    stages: tuple[int, ...]  # whose gradients or weights
    num_owners: int  # devices that take part
    num_bytes: float
    start: float  # seconds, as `end`
    end: float
    what: Literal["gradients", "weights"] = "gradients"


@dataclass(frozen=True)
class DeviceTimeline:
    """What one device does in a step, predicted or measured."""

    device: str
    actions: tuple[Span, ...]  # in order of start: computations, and, if measured, all other actions of the schedule
    messages: tuple[Message, ...] = ()  # that it sends and receives
    syncs: tuple[Sync, ...] = ()  # that it takes part in
    segments: tuple[Stretch, ...] = ()  # of a stage's program, inside the actions that run them
    waits: tuple[Stretch, ...] = ()  # that are no actions: for gradients or weights, or inside passes for communication in a split group
    memory: tuple[tuple[float, float], ...] = ()  # (second, bytes), in order; empty if not counted

    @property
    def end(self) -> float:
        return max((each.end for kind in (self.actions, self.syncs, self.waits) for each in kind), default=0.0)

    @property
    def computations(self) -> tuple[Span, ...]:
        return tuple(span for span in self.actions if span.action.kind in COMPUTE or span.action.kind is Kind.STEP)

    @property
    def exposed(self) -> float:
        """Seconds without computation while a message to it, or a bucket of it, is in transit; and waits inside computations."""
        computing = [(span.start, span.end) for span in self.computations]
        coming = [(each.start, each.end) for each in self.messages if each.target == self.device]
        coming += [(each.start, each.end) for each in self.syncs]
        waiting = [(each.start, each.end) for each in self.waits]
        outside = _length([*coming, *computing]) - _length(computing)
        inside = _length(computing) + _length(waiting) - _length([*computing, *waiting])
        return outside + inside


@dataclass(frozen=True)
class StepRecording:
    """A step of a real run."""

    step_number: int  # from 1, as `Engine.step_number` after it
    num_rows: int  # of its batch
    devices: tuple[DeviceTimeline, ...]  # by rank of the plan; seconds count from the first action of all
    clock_error: float  # seconds by which the clocks of two devices may differ at most
    # since the step before, of the slowest rank: time of the script, such as loading data; None for the first
    seconds_before: float | None = None

    @property
    def step_seconds(self) -> float:
        return max((each.end for each in self.devices), default=0.0)


STEPS = "steps.json"  # the file of a recorded run in its folder


@dataclass(frozen=True)
class RecordedRun:
    """The recorded steps of a run, in order."""

    plan: str  # in words
    planned_rows: int  # of the batch that the plan is for
    predicted_seconds: float  # of a step
    steps: tuple[StepRecording, ...]

    @property
    def alike(self) -> tuple[StepRecording, ...]:
        """The steps with as many rows as the plan is for; all if there are none."""
        return tuple(each for each in self.steps if each.num_rows == self.planned_rows) or self.steps

    @property
    def shown(self) -> StepRecording | None:
        """The median one of those; None if nothing was recorded."""
        return sorted(self.alike, key=lambda each: each.step_seconds)[len(self.alike) // 2] if self.steps else None


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, -inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Timeline:
    """Spans per pipeline rank."""

    ranks: tuple[tuple[Span, ...], ...]  # per rank, compute spans in order of start
    peak_in_flight: tuple[int, ...] = ()  # per rank, the most chunk activations alive at once
    # gradient synchronisation that no computation hides: from the end of the last computation to that of the last SYNC
    exposed_sync: float = 0.0
    syncs: tuple[tuple[Span, ...], ...] = ()  # per rank, spans of SYNC actions, which occupy the rank's network and not the rank

    @property
    def makespan(self) -> float:
        """End of the last action of all, synchronisation included."""
        return max((span.end for spans in (*self.ranks, *self.syncs) for span in spans), default=0.0)
