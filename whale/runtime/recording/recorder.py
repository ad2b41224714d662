"""Records the timeline of each rank in chosen steps, and combines them into the step of all ranks.

While a step runs a rank only appends times to lists, without waiting. A GPU's host runs ahead of it: begin and end of everything are
events in its stream, which the host reads after the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal, Protocol

import torch

from whale.comm import Channel, Clock, Launched
from whale.ir.schedule import Action
from whale.ir.timeline import DeviceTimeline, Message, Span, StepRecording, Stretch, Sync
from whale.runtime.program.watch import Place
from whale.runtime.recording.meter import Meter


@dataclass(frozen=True, slots=True)
class Leg:
    """One end of a message."""

    name: str  # the stages and the micro-batch: ``0 -> 1 F3``
    source: int  # ranks of the world
    target: int
    num_bytes: int  # of all its tensors
    start: float  # at the sender both the time of the send; at the receiver when it was posted and waited for
    end: float


@dataclass(frozen=True)
class RankStep:
    """What one rank recorded, in seconds of rank 0's clock."""

    rank: int  # of the world
    spans: tuple[Span, ...]  # of its actions, in order
    sends: tuple[Leg, ...]  # its ends of messages
    receives: tuple[Leg, ...]
    syncs: tuple[Sync, ...]  # see `DeviceTimeline`
    segments: tuple[Stretch, ...]
    waits: tuple[Stretch, ...]
    memory: tuple[tuple[float, float], ...]
    clock_error: float  # by which its clock may differ from rank 0's
    seconds_before: float | None = None  # since its previous step; None for the first


def put_together(step_number: int, num_rows: int, ranks: Sequence[RankStep], device_of: Mapping[int, str]) -> StepRecording:
    """The step of all ranks.

    Args:
        step_number: from 1.
        device_of: the device of each rank of the plan, by its number in the world, in the plan's order.
    """
    by_rank = {each.rank: each for each in ranks}
    own = {rank: by_rank[rank] for rank in device_of}
    zero = min((span.start for each in own.values() for span in each.spans[:1]), default=0.0)
    sent = {(leg.name, leg.source, leg.target): leg for each in own.values() for leg in each.sends}
    messages: dict[int, list[Message]] = {rank: [] for rank in device_of}
    for leg in sorted((leg for each in own.values() for leg in each.receives), key=lambda leg: leg.end):
        start = max(sent[leg.name, leg.source, leg.target].start, leg.start)
        source, target = device_of[leg.source], device_of[leg.target]
        message = Message(leg.name, source, target, leg.num_bytes, min(start, leg.end) - zero, leg.end - zero)
        messages[leg.source].append(message)
        messages[leg.target].append(message)
    timelines = tuple(_timeline(device, own[rank], messages[rank], zero) for rank, device in device_of.items())
    before = max((each.seconds_before for each in own.values() if each.seconds_before is not None), default=None)
    return StepRecording(step_number, num_rows, timelines, max(each.clock_error for each in own.values()), before)


def _timeline(device: str, seen: RankStep, messages: Sequence[Message], zero: float) -> DeviceTimeline:
    return DeviceTimeline(
        device,
        tuple(Span(span.action, span.start - zero, span.end - zero) for span in seen.spans),
        tuple(messages),
        tuple(replace(sync, start=sync.start - zero, end=sync.end - zero) for sync in seen.syncs),
        tuple(Stretch(each.name, each.start - zero, each.end - zero) for each in seen.segments),
        tuple(Stretch(each.name, each.start - zero, each.end - zero) for each in seen.waits),
        tuple((time - zero, num_bytes) for time, num_bytes in seen.memory),
    )


Tick = float | torch.cuda.Event


class Ticks(Protocol):
    """A source of times."""

    def now(self) -> Tick:
        """The current time, or an event that will record it."""

    def seconds(self, tick: Tick) -> float:
        """The time of a tick, by `time.perf_counter`; waits for the device."""

    def num_bytes(self) -> int | None:
        """Bytes of tensors on the device; None if nothing counts them."""


class HostTicks:
    """Times of the host, for a CPU."""

    def now(self) -> Tick:
        return perf_counter()

    def seconds(self, tick: Tick) -> float:
        assert isinstance(tick, float)
        return tick

    def num_bytes(self) -> int | None:
        return None


class StreamTicks:
    """Times in a GPU's current stream.

    Args:
        device: the GPU; synchronised once, here, to compare its time with the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._first = self._event()
        self._start = perf_counter()
        self._is_over = False

    def now(self) -> Tick:
        return self._event()

    def seconds(self, tick: Tick) -> float:
        if isinstance(tick, float):  # of the host
            return tick
        if not self._is_over:
            torch.cuda.synchronize(self._device)
            self._is_over = True
        return self._start + float(self._first.elapsed_time(tick)) / 1e3

    def num_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


Route = tuple[Place, Place, Channel]


@dataclass
class _Way:
    """One end of a message: its bytes so far, its first and its last time."""

    num_bytes: int
    start: Tick
    end: Tick


@dataclass
class _Sum:
    """A bucket in flight; if the host carries it, `done` is the time of completion."""

    what: Literal["gradients", "weights"]
    stages: tuple[int, ...]
    num_owners: int
    num_bytes: int
    start: Tick
    done: Tick | None = None
    end: Tick | None = None


@dataclass
class _Notes:
    """The records of one step."""

    ticks: Ticks
    clock: Clock
    actions: list[tuple[Action, Tick, Tick]] = field(default_factory=list)
    segments: list[tuple[str, Tick, Tick]] = field(default_factory=list)
    waits: list[tuple[str, Tick, Tick]] = field(default_factory=list)
    sent: dict[Route, _Way] = field(default_factory=dict)
    received: dict[Route, _Way] = field(default_factory=dict)
    sums: list[_Sum] = field(default_factory=list)
    memory: list[tuple[Tick, int]] = field(default_factory=list)


class Recorder(Meter):
    """Records the steps between `start` and `stop`; outside of them it is only a meter."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(device)
        self._rank = rank
        self._notes: _Notes | None = None
        self._under_way: dict[tuple[str, int], _Sum] = {}
        self._action: Action | None = None
        self._begun: Tick = 0.0

    def start(self, clock: Clock) -> None:
        """Starts to record, with this rank's clock."""
        self._notes = notes = _Notes(StreamTicks(self.device) if self.device.type == "cuda" else HostTicks(), clock)
        self._under_way = {key: each for key, each in self._under_way.items() if each.what == "weights"}
        for each in self._under_way.values():
            each.start = notes.ticks.now()
            notes.sums.append(each)

    def stop(self) -> RankStep:
        """Ends the record; waits for the device."""
        assert self._notes is not None, "start comes before stop"
        notes, self._notes = self._notes, None
        ticks, offset = notes.ticks, notes.clock.offset

        def at(tick: Tick) -> float:
            return ticks.seconds(tick) + offset

        return RankStep(
            self._rank,
            tuple(Span(action, at(start), at(end)) for action, start, end in notes.actions),
            tuple(_leg(route, way, at(way.start), at(way.start)) for route, way in notes.sent.items()),
            tuple(_leg(route, way, at(way.start), at(way.end)) for route, way in notes.received.items()),
            tuple(
                Sync(s.stages, s.num_owners, float(s.num_bytes), at(s.start), max(at(s.start), at(s.done or s.end)), s.what)
                for s in notes.sums
                if s.end is not None  # else the step was abandoned
            ),
            tuple(Stretch(name, at(start), at(end)) for name, start, end in notes.segments),
            tuple(Stretch(name, at(start), at(end)) for name, start, end in notes.waits),
            tuple((at(tick), float(num_bytes)) for tick, num_bytes in notes.memory),
            notes.clock.error,
        )

    def begin(self, action: Action) -> None:
        super().begin(action)
        if self._notes is not None:
            self._action, self._begun = action, self._notes.ticks.now()
            self._count_bytes(self._notes, self._begun)

    def end(self) -> None:
        super().end()
        if self._notes is not None and self._action is not None:
            now = self._notes.ticks.now()
            self._notes.actions.append((self._action, self._begun, now))
            self._count_bytes(self._notes, now)
            self._action = None

    def waiting(self, what: str) -> AbstractContextManager[None]:
        notes, paused = self._notes, super().waiting(what)
        return paused if notes is None else _both(paused, _stretch(what, notes.ticks, notes.waits))

    def segment(self, name: str) -> AbstractContextManager[None]:
        notes = self._notes
        return nullcontext() if notes is None else _stretch(name, notes.ticks, notes.segments)

    def sent(self, sender: Place, receiver: Place, channel: Channel, wire: torch.Tensor) -> None:
        if self._notes is not None:
            _note(self._notes.sent, (sender, receiver, channel), wire, self._notes.ticks.now())

    def posted(self, sender: Place, receiver: Place, channel: Channel, wire: torch.Tensor) -> None:
        if self._notes is not None:
            _note(self._notes.received, (sender, receiver, channel), wire, self._notes.ticks.now())

    def arrived(self, sender: Place, receiver: Place, channel: Channel) -> None:
        if self._notes is not None:
            self._notes.received[sender, receiver, channel].end = self._notes.ticks.now()

    def summing(self, bucket: int, stages: Collection[int], ranks: Collection[int], flat: torch.Tensor, work: Launched) -> None:
        if self._notes is not None:
            self._under_way["gradients", bucket] = started = _started("gradients", stages, ranks, flat, work, self._notes.ticks.now())
            self._notes.sums.append(started)

    def summed(self, bucket: int) -> None:
        self._end_sum(("gradients", bucket))

    def publishing(self, bucket: int, stages: Collection[int], ranks: Collection[int], flat: torch.Tensor, work: Launched) -> None:
        self._under_way["weights", bucket] = _started("weights", stages, ranks, flat, work, 0.0)

    def published(self, bucket: int) -> None:
        self._end_sum(("weights", bucket))

    def _end_sum(self, key: tuple[str, int]) -> None:
        started = self._under_way.pop(key, None)
        if self._notes is not None and started is not None:
            started.end = self._notes.ticks.now()

    @staticmethod
    def _count_bytes(notes: _Notes, now: Tick) -> None:
        num_bytes = notes.ticks.num_bytes()
        if num_bytes is not None:
            notes.memory.append((now, num_bytes))


def _started(
    what: Literal["gradients", "weights"],
    stages: Collection[int],
    ranks: Collection[int],
    flat: torch.Tensor,
    work: Launched,
    now: Tick,
) -> _Sum:
    started = _Sum(what, tuple(sorted(stages)), len(ranks), flat.numel() * flat.element_size(), now)
    if work.blocks_host:

        def done(_: object) -> None:
            started.done = perf_counter()

        work.work.get_future().add_done_callback(done)
    return started


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield


@contextmanager
def _stretch(name: str, ticks: Ticks, into: list[tuple[str, Tick, Tick]]) -> Iterator[None]:
    """Records an interval, also if it ends by an exception: torch ends recomputation early by one."""
    start = ticks.now()
    try:
        yield
    finally:
        into.append((name, start, ticks.now()))


def _note(ways: dict[Route, _Way], route: Route, wire: torch.Tensor, now: Tick) -> None:
    """Adds a tensor to the message of its route."""
    num_bytes = wire.numel() * wire.element_size()
    known = ways.get(route)
    if known is None:
        ways[route] = _Way(num_bytes, now, now)
    else:
        known.num_bytes += num_bytes


def _leg(route: Route, way: _Way, start: float, end: float) -> Leg:
    (direction, source, micro_batch), (_, target, _), channel = route
    name = f"{source} -> {target} {'F' if direction == 'forward' else 'B'}{micro_batch}"
    return Leg(name, channel.source, channel.target, way.num_bytes, start, end)
