"""The predicted or measured times of a schedule's actions, and of what travels between devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

from whale.ir.schedule import COMPUTE, Action, Kind


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end, in the unit of the costs it was made from (seconds, as a rule)."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time with a name: a segment inside an action, or a wait that is no action (``gradients``)."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors on their way from one device to another.

    Attributes:
        name: the stages and the micro-batch: ``0 -> 1 F3``.
        source, target: devices.
        num_bytes: of all tensors together.
        start, end: seconds: when both ends are ready, and when all has arrived.
    """

    name: str
    source: str
    target: str
    num_bytes: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Sync:
    """A bucket of gradients that its owners sum, or of weights that those of them who keep some give the others.

    Attributes:
        stages: whose gradients or weights.
        num_owners: devices that take part.
        num_bytes: of what is in it.
        start, end: seconds.
        what: is in it.
    """

    stages: tuple[int, ...]
    num_owners: int
    num_bytes: float
    start: float
    end: float
    what: Literal["gradients", "weights"] = "gradients"


@dataclass(frozen=True)
class DeviceTimeline:
    """What one device does in a step, predicted or measured.

    Attributes:
        device: its name.
        actions: in order of start: computations, and, where it was measured, all other actions of the schedule.
        messages: that it sends and receives.
        syncs: that it takes part in.
        segments: of a stage's program, inside the actions that run them.
        waits: for others, where no action stands for it: for gradients, or inside passes for what a split group exchanges, or for weights.
        memory: (second, bytes), in order; empty where nobody counts them.
    """

    device: str
    actions: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    syncs: tuple[Sync, ...] = ()
    segments: tuple[Stretch, ...] = ()
    waits: tuple[Stretch, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()

    @property
    def end(self) -> float:
        """When the last of it is over."""
        return max((each.end for kind in (self.actions, self.syncs, self.waits) for each in kind), default=0.0)

    @property
    def computations(self) -> tuple[Span, ...]:
        """The actions that compute."""
        return tuple(span for span in self.actions if span.action.kind in COMPUTE or span.action.kind is Kind.STEP)

    @property
    def exposed(self) -> float:
        """Seconds in which it computes nothing while a message to it, or a bucket that it takes part in, is on its way; and waits inside
        computations.
        """
        computing = [(span.start, span.end) for span in self.computations]
        coming = [(each.start, each.end) for each in self.messages if each.target == self.device]
        coming += [(each.start, each.end) for each in self.syncs]
        waiting = [(each.start, each.end) for each in self.waits]
        outside = _length([*coming, *computing]) - _length(computing)
        inside = _length(computing) + _length(waiting) - _length([*computing, *waiting])
        return outside + inside


@dataclass(frozen=True)
class StepRecording:
    """A step of a real run.

    Attributes:
        step_number: from 1, as `Engine.step_number` is after it.
        num_rows: of its batch.
        devices: what each did, in the order of the plan's ranks; seconds count from the first action of all.
        clock_error: seconds by which the clocks of two devices may differ at most.
        seconds_before: since the step before, of the rank that took longest: what the script did, such as loading data; None for the first.
    """

    step_number: int
    num_rows: int
    devices: tuple[DeviceTimeline, ...]
    clock_error: float
    seconds_before: float | None = None

    @property
    def step_seconds(self) -> float:
        """Until the last device has done."""
        return max((each.end for each in self.devices), default=0.0)


STEPS = "steps.json"
"""The file of a recorded run, in the folder that it is recorded in."""


@dataclass(frozen=True)
class RecordedRun:
    """The recorded steps of a run.

    Attributes:
        plan: what it ran, in words.
        planned_rows: of the batch that the plan is for.
        predicted_seconds: of a step.
        steps: in order.
    """

    plan: str
    planned_rows: int
    predicted_seconds: float
    steps: tuple[StepRecording, ...]

    @property
    def alike(self) -> tuple[StepRecording, ...]:
        """Those with as many rows as the plan is for; all where there are none."""
        return tuple(each for each in self.steps if each.num_rows == self.planned_rows) or self.steps

    @property
    def shown(self) -> StepRecording | None:
        """Of these the one of middle length; None where nothing was recorded."""
        return sorted(self.alike, key=lambda each: each.step_seconds)[len(self.alike) // 2] if self.steps else None


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Of all intervals together, where they overlap once."""
    total, reached = 0.0, -inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Timeline:
    """Spans per pipeline rank.

    Attributes:
        ranks: per rank, compute spans in order of start.
        peak_in_flight: per rank, the most chunk activations alive at once.
        exposed_sync: gradient synchronisation that no computation hides: from the end of the last computation
            of all to the end of the last synchronisation.
        syncs: per rank, spans of SYNC actions, which occupy the rank's network and not the rank.
    """

    ranks: tuple[tuple[Span, ...], ...]
    peak_in_flight: tuple[int, ...] = ()
    exposed_sync: float = 0.0
    syncs: tuple[tuple[Span, ...], ...] = ()

    @property
    def makespan(self) -> float:
        """End of the last action of all, synchronisation included."""
        return max((span.end for spans in (*self.ranks, *self.syncs) for span in spans), default=0.0)
