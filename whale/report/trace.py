"""Steps as a trace that Perfetto and chrome://tracing open: predicted and measured, one process per device.

process  predicted big/0   |  measured big/0                         the predicted step above the measured ones
thread   actions             slices, segments inside them
tracks   messages, gradients, weights, waits     slices that may overlap
counter  memory
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from whale.estimate import StepEstimate
from whale.ir.plan import Plan
from whale.ir.schedule import COMPUTE
from whale.ir.timeline import DeviceTimeline, StepRecording

Event = dict[str, object]
_MICROSECONDS = 1e6


def trace_json(plan: Plan, step: StepEstimate | None, recordings: Sequence[StepRecording] = ()) -> str:
    """The trace, in the JSON form of Chrome's trace events.

    Args:
        plan: names the devices.
        step: the prediction, drawn from time 0, once for equal devices; None leaves it out.
        recordings: consecutive steps of a run.
    """
    events: list[Event] = []
    if step is not None:
        for each in step.devices:
            number = 1 + plan.rank_of[each.devices[0]]
            events += _named(number, f"predicted {each.name}")
            events += _device(each.timeline, number, 0.0, "")
    offset = 0.0
    for recording in recordings:
        for timeline in recording.devices:
            number = 1 + len(plan.devices) + plan.rank_of[timeline.device]
            if recording is recordings[0]:
                events += _named(number, f"measured {timeline.device}")
            events += _device(timeline, number, offset, f"step {recording.step_number} ")
        offset += recording.step_seconds
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _named(process: int, name: str) -> Iterator[Event]:
    values = {"process_name": {"name": name}, "process_sort_index": {"sort_index": process}, "thread_name": {"name": "actions"}}
    for what, words in values.items():
        yield {"ph": "M", "name": what, "pid": process, "tid": 0, "ts": 0, "args": words}


def _device(timeline: DeviceTimeline, process: int, offset: float, prefix: str) -> Iterator[Event]:
    for span in timeline.actions:
        kind = "compute" if span.action.kind in COMPUTE else "action"
        yield _slice(str(span.action), kind, process, offset + span.start, offset + span.end)
    for segment in timeline.segments:
        yield _slice(segment.name, "segment", process, offset + segment.start, offset + segment.end)
    for message in timeline.messages:
        if message.target == timeline.device:  # each message once, where it arrives
            text = {"from": message.source, "to": message.target, "bytes": round(message.num_bytes)}
            yield from _overlapping(f"messages {message.name}", prefix, process, offset + message.start, offset + message.end, text)
    for sync in timeline.syncs:
        stages = ", ".join(map(str, sync.stages))
        text = {"devices": sync.num_owners, "bytes": round(sync.num_bytes)}
        yield from _overlapping(f"{sync.what} of stage {stages}", prefix, process, offset + sync.start, offset + sync.end, text)
    for wait in timeline.waits:
        yield from _overlapping(f"wait for {wait.name}", prefix, process, offset + wait.start, offset + wait.end, {})
    for time, num_bytes in timeline.memory:
        yield {"ph": "C", "name": "memory", "pid": process, "tid": 0, "ts": _ts(offset + time), "args": {"bytes": round(num_bytes)}}


def _slice(name: str, category: str, process: int, start: float, end: float) -> Event:
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": 0, "ts": _ts(start), "dur": _ts(end - start)}


def _overlapping(name: str, prefix: str, process: int, start: float, end: float, values: dict[str, object]) -> Iterator[Event]:
    """A slice that may overlap with others: begin and end are matched by name and id."""
    place = f"{prefix}{process} {name} {start!r}"
    own: Event = {"name": name, "cat": name.split()[0], "id": place, "pid": process, "tid": 0}
    yield {**own, "ph": "b", "ts": _ts(start), "args": values}
    yield {**own, "ph": "e", "ts": _ts(end)}


def _ts(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)
