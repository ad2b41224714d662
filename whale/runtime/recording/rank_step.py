"""What each rank recorded of a step, and the combined step.

A message has two ends: its transfer begins when it is sent or its receive is posted, whichever is later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whale.ir.timeline import DeviceTimeline, Message, Span, StepRecording, Stretch, Sync


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
