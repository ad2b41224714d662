"""The estimate of a step: time, memory, and use of links, with a text form."""

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
    """Bytes on a device at one time, by purpose."""

    weights: float = 0.0  # of parameters
    gradients: float = 0.0  # in their buckets, each once
    optimizer: float = 0.0  # state besides weights and gradients
    activations: float = 0.0  # kept by micro-batches in flight, with received and handed-on tensors
    recomputed: float = 0.0  # kept again after recomputation
    received: float = 0.0  # tensors that arrive ahead of their use
    sent: float = 0.0  # gradients in flight
    working: float = 0.0  # of the running op
    communicators: float = 0.0  # buffers of NCCL, which torch's allocator knows nothing of

    @property
    def total(self) -> float:
        return sum(num_bytes for _, num_bytes in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        return tuple((name, getattr(self, name)) for name in self.__slots__)

    def __str__(self) -> str:
        found = sorted(((name, num_bytes) for name, num_bytes in self.parts if num_bytes >= 0.5), key=lambda part: -part[1])
        return ", ".join(f"{name} {format_bytes(round(num_bytes))}" for name, num_bytes in found)


@dataclass(frozen=True)
class DeviceEstimate:
    """What some devices do in a step, all of them the same at the same times."""

    devices: tuple[str, ...]  # their names
    stages: tuple[int, ...]  # that they run
    compute: tuple[Span, ...]  # F, B, I, W, R, and the optimizer's STEP at the end; `waits` lie inside
    messages: tuple[Message, ...]  # that the first of them sends and receives
    syncs: tuple[Sync, ...]  # that they take part in
    exposed: float  # seconds of waiting for something in flight
    memory: tuple[tuple[float, float], ...]  # (second, bytes) wherever the bytes change
    peak: MemoryUse  # what fills the memory when it is fullest
    stage_peaks: tuple[float, ...]  # per stage of `stages`, bytes besides parameters at that time
    stage_bytes: tuple[float, ...]  # per stage of `stages`, bytes of its parameters with gradients and optimizer state
    capacity: int  # bytes that a plan may use
    on_host: float = 0.0  # bytes of each of them in the memory of its host
    waits: tuple[Stretch, ...] = ()  # for weights, inside forward passes
    num_given: int = 0  # buckets of weights that it receives or sends before the step ends
    own_seconds: float = 0.0  # of its own ops in all passes, without the optimizer's step, exchanges and waits

    @property
    def timeline(self) -> DeviceTimeline:
        """Of the first device."""
        return DeviceTimeline(self.devices[0], self.compute, self.messages, self.syncs, waits=self.waits, memory=self.memory)

    @property
    def name(self) -> str:
        """The first two of them, and how many more do the same."""
        return first_few(self.devices, 2)

    def does(self, verb: str) -> str:
        """A verb in the number of `name`, given in the singular: ``computes``."""
        return verb.removesuffix("s") if len(self.devices) > 1 else verb

    def of_stage(self, stage: int) -> Estimate:
        """The figures of one of its stages, with the times of its longest micro-batch."""
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
        """Seconds during which gradients are summed."""
        return _covered([(sync.start, sync.end) for sync in self._summed])

    @property
    def _summed(self) -> tuple[Sync, ...]:
        return tuple(sync for sync in self.syncs if sync.what == "gradients")

    @property
    def communicating(self) -> float:
        """Seconds with a message or collective in flight, without exchanges inside split groups."""
        travelling = [(message.start, message.end) for message in self.messages]
        return _covered(travelling + [(sync.start, sync.end) for sync in self.syncs])

    @property
    def exposed_sync(self) -> float:
        """Of `syncing`, the seconds after the last computation."""
        last = max((span.end for span in self.compute if span.action.kind is not Kind.STEP), default=0.0)
        return _covered([(max(sync.start, last), sync.end) for sync in self._summed])

    @cached_property
    def busy(self) -> float:
        """Seconds of computing."""
        return sum(span.end - span.start for span in self.compute) - sum(wait.end - wait.start for wait in self.waits)


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Use of a link in a step."""

    name: str  # ``h0/1 out``: a side of a device or host card; ``h0/1 out, network``: of the device's link to other hosts
    num_alike: int  # links with equal use
    num_bytes: float  # that pass it
    share: float  # of its capacity during the step


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of one step of a plan."""

    # from the first forward pass to the end of the optimizer's step on the last device, and of redundant copies and averages of weights
    step_seconds: float
    devices: tuple[DeviceEstimate, ...]  # grouped by what they do; each device of the plan is in one group
    links: tuple[LinkUse, ...]  # by use, without redundant copies and averages of weights
    bubble_rate: float  # idle share of the rank with the longest span of computations
    redundancy: Redundancy | None = None  # cost of redundant copies; None without
    averaging: float = 0.0  # seconds of the mean step in which groups that step on their own average their weights

    @cached_property
    def _of(self) -> dict[str, DeviceEstimate]:
        return {name: each for each in self.devices for name in each.devices}

    def of(self, device: str) -> DeviceEstimate:
        return self._of[device]

    @property
    def training_seconds(self) -> float:
        """Of the step, without redundant copies and averages of weights."""
        return self.step_seconds - self.averaging - (0.0 if self.redundancy is None else self.redundancy.step_seconds)

    @property
    def beside(self) -> str:
        """The mean times of redundant copies and averages of weights in words, to be added to others; empty without."""
        averages = f", {format_seconds(self.averaging)} of averages over hosts" if self.averaging else ""
        return averages if self.redundancy is None else f"{averages}, {format_seconds(self.redundancy.step_seconds)} of copies"

    def idle(self, each: DeviceEstimate) -> float:
        """Seconds in which a device neither computes, nor waits for something in flight, nor copies or averages the state."""
        return max(0.0, self.training_seconds - each.busy - each.exposed)

    def own_seconds(self, devices: Iterable[str]) -> tuple[float, ...]:
        """Per device, seconds of its own computing."""
        return tuple(self.of(name).own_seconds for name in devices)

    @cached_property
    def straggler(self) -> DeviceEstimate:
        """The devices that compute longest, which the others wait for."""
        return max(self.devices, key=lambda each: each.busy)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        slow = self.straggler
        yield (
            f"step {format_seconds(self.step_seconds)}: {slow.name} computes longest, {format_seconds(slow.busy)}, "
            f"waits {format_seconds(slow.exposed)} for communication and {format_seconds(self.idle(slow))} for other devices; "
            f"bubble rate {self.bubble_rate:.3f}{self.beside}"
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
