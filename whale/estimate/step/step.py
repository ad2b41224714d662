"""What a step is estimated to take: time, memory, and the use of links, as one value with a text form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from whale.errors import first_few
from whale.ir.plan import Estimate
from whale.ir.schedule import Kind
from whale.ir.timeline import DeviceTimeline, Message, Span, Stretch, Sync
from whale.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whale.estimate.step.redundancy import Redundancy


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on a device at one time, by what they are.

    Attributes:
        weights, gradients, optimizer: of parameters; gradients in their buckets, each once.
        activations: what micro-batches in flight keep for their backward passes, received and handed on tensors among it.
        recomputed: what is kept again after it was computed again.
        received: tensors that arrive, or have arrived, ahead of their use.
        sent: gradients on their way.
        working: of the op at work.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    recomputed: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    working: float = 0.0

    @property
    def total(self) -> float:
        return sum(num_bytes for _, num_bytes in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Names and bytes, in the order above."""
        return tuple((name, getattr(self, name)) for name in self.__slots__)

    def __str__(self) -> str:
        found = sorted(((name, num_bytes) for name, num_bytes in self.parts if num_bytes >= 0.5), key=lambda part: -part[1])
        return ", ".join(f"{name} {format_bytes(round(num_bytes))}" for name, num_bytes in found)


@dataclass(frozen=True)
class DeviceEstimate:
    """What some devices do in a step, all of them the same at the same times.

    Attributes:
        devices: their names.
        stages: that they run.
        compute: F, B, I, W, R, and the optimizer's STEP at the end; with `waits` in their midst.
        messages: that the first of them sends and receives.
        syncs: that they take part in.
        exposed: seconds of waiting while what is awaited is on its way.
        memory: (second, bytes) wherever the bytes change.
        peak: what fills the memory when it is fullest.
        stage_peaks: per stage of `stages`, bytes beside parameters at that time.
        stage_bytes: per stage of `stages`, bytes of its parameters with what training keeps beside them.
        capacity: bytes that a plan may use.
        on_host: bytes of each of them in the memory of its host.
        waits: for weights, in the midst of forward passes.
        num_given: buckets of weights that it takes or gives before the step ends.
        own_seconds: of its own ops in all passes, without the optimizer's step, and without what is exchanged and waited for.
    """

    devices: tuple[str, ...]
    stages: tuple[int, ...]
    compute: tuple[Span, ...]
    messages: tuple[Message, ...]
    syncs: tuple[Sync, ...]
    exposed: float
    memory: tuple[tuple[float, float], ...]
    peak: MemoryUse
    stage_peaks: tuple[float, ...]
    stage_bytes: tuple[float, ...]
    capacity: int
    on_host: float = 0.0
    waits: tuple[Stretch, ...] = ()
    num_given: int = 0
    own_seconds: float = 0.0

    @property
    def timeline(self) -> DeviceTimeline:
        """What the first of them does when."""
        return DeviceTimeline(self.devices[0], self.compute, self.messages, self.syncs, waits=self.waits, memory=self.memory)

    @property
    def name(self) -> str:
        """The first two of them, and how many more do the same."""
        return first_few(self.devices, 2)

    def does(self, verb: str) -> str:
        """A verb as it stands behind the name, given as of one device: ``computes``."""
        return verb.removesuffix("s") if len(self.devices) > 1 else verb

    def of_stage(self, stage: int) -> Estimate:
        """The figures of one of its stages: the times of the micro-batch that takes longest."""
        longest: dict[Kind, float] = {}
        for span in self.compute:
            if span.action.stage == stage:
                waited = sum(wait.end - wait.start for wait in self.waits if span.start <= wait.start < span.end)
                longest[span.action.kind] = max(longest.get(span.action.kind, 0.0), span.end - span.start - waited)
        backward = sum(longest.get(kind, 0.0) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE))
        index = self.stages.index(stage)
        kept, held = round(self.stage_peaks[index]), round(self.stage_bytes[index])
        return Estimate(longest.get(Kind.FORWARD, 0.0), backward, held, kept, self.capacity)

    @property
    def optimizer(self) -> float:
        """Seconds of the optimizer's step."""
        return sum(span.end - span.start for span in self.compute if span.action.kind is Kind.STEP)

    @property
    def syncing(self) -> float:
        """Seconds in which gradients are being summed."""
        return _covered([(sync.start, sync.end) for sync in self._summed])

    @property
    def _summed(self) -> tuple[Sync, ...]:
        return tuple(sync for sync in self.syncs if sync.what == "gradients")

    @property
    def communicating(self) -> float:
        """Seconds in which something is on its way to it or from it, beside what is exchanged inside split groups."""
        travelling = [(message.start, message.end) for message in self.messages]
        return _covered(travelling + [(sync.start, sync.end) for sync in self.syncs])

    @property
    def exposed_sync(self) -> float:
        """Those of them that lie behind the last computation."""
        last = max((span.end for span in self.compute if span.action.kind is not Kind.STEP), default=0.0)
        return _covered([(max(sync.start, last), sync.end) for sync in self._summed])

    @cached_property
    def busy(self) -> float:
        """Seconds of computing."""
        return sum(span.end - span.start for span in self.compute) - sum(wait.end - wait.start for wait in self.waits)

    def idle(self, step_seconds: float) -> float:
        """Seconds in which it neither computes nor waits for what is on its way."""
        return max(0.0, step_seconds - self.busy - self.exposed)


@dataclass(frozen=True, slots=True)
class LinkUse:
    """How much passes a link in a step.

    Attributes:
        name: ``h0/1 out``: the device's (or the host card's) side that it is; ``h0/1 out, network``: the same of its link to other hosts.
        num_alike: links with equal use.
        num_bytes: that pass it.
        share: of what could pass it in the time of the step.
    """

    name: str
    num_alike: int
    num_bytes: float
    share: float


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of one step of a plan.

    Attributes:
        step_seconds: from the first forward pass to the end of the optimizer's step on the last device.
        devices: by what they do; each device of the plan is in one of them.
        links: by use.
        bubble_rate: the share of its time from first to last computation for which the longest rank does not compute.
        redundancy: what copies of the state take beside the step; None where none are made.
    """

    step_seconds: float
    devices: tuple[DeviceEstimate, ...]
    links: tuple[LinkUse, ...]
    bubble_rate: float
    redundancy: Redundancy | None = None

    @cached_property
    def _of(self) -> dict[str, DeviceEstimate]:
        return {name: each for each in self.devices for name in each.devices}

    def of(self, device: str) -> DeviceEstimate:
        """What one device does."""
        return self._of[device]

    def own_seconds(self, devices: Iterable[str]) -> tuple[float, ...]:
        """What each of some devices computes itself."""
        return tuple(self.of(name).own_seconds for name in devices)

    @cached_property
    def straggler(self) -> DeviceEstimate:
        """The devices that compute longest: what the others wait for."""
        return max(self.devices, key=lambda each: each.busy)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        slow = self.straggler
        yield (
            f"step {format_seconds(self.step_seconds)}: {slow.name} computes longest, {format_seconds(slow.busy)}, "
            f"waits {format_seconds(slow.exposed)} for communication and {format_seconds(slow.idle(self.step_seconds))} for other devices; "
            f"bubble rate {self.bubble_rate:.3f}"
        )
        for each in self.devices:
            yield (
                f"  {each.name}: stage {', '.join(map(str, each.stages))}, computes {format_seconds(each.busy)}, "
                f"exposed communication {format_seconds(each.exposed)}, "
                f"{format_bytes(round(each.peak.total))} of {format_bytes(each.capacity)} ({each.peak})"
            )
        for link in self.links:
            alike = f" and {link.num_alike - 1} more" if link.num_alike > 1 else ""
            yield f"  link {link.name}{alike}: {format_bytes(round(link.num_bytes))}, {link.share:.1%} of the step"


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
