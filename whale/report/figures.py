"""The figures of a step: tiles for the whole of it, a table of devices and one of links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.timeline import StepRecording
from whale.report.elements import table, tile
from whale.report.tracks import Track
from whale.units import counted, format_bytes, format_seconds, format_share


def tiles(plan: Plan, step: StepEstimate, recording: StepRecording | None) -> Iterator[str]:
    """What a reader asks first."""
    slow, full = step.straggler, max(step.devices, key=lambda each: each.peak.total / each.capacity)
    yield tile("Step, predicted", format_seconds(step.step_seconds), _rate(plan.planned_rows, step.step_seconds))
    if recording is not None:
        seconds, rows = recording.step_seconds, recording.num_rows
        times = f", {seconds / step.step_seconds:.2f} times the prediction" if step.step_seconds and rows == plan.planned_rows else ""
        yield tile("Step, measured", format_seconds(seconds), _rate(rows, seconds) + times)
    yield tile("Bubble rate", f"{step.bubble_rate:.1%}", "predicted, of the rank that takes longest")
    yield tile("Exposed communication", format_seconds(slow.exposed), f"predicted, of {slow.devices[0]}")
    share = format_share(full.peak.total / full.capacity)
    yield tile("Fullest memory", format_bytes(round(full.peak.total)), f"{share} of {format_bytes(full.capacity)}, {full.devices[0]}")


def _rate(rows: int, seconds: float) -> str:
    return f"{counted(rows, 'row')}, {rows / seconds:,.0f} per second" if seconds else f"{counted(rows, 'row')}"


def device_table(cluster: Cluster, step: StepEstimate, tracks: Sequence[Track]) -> str:
    """A row for each track; what was measured stands beside what is predicted."""
    is_measured = any(track.measured for track in tracks)
    times = ("computes", *(("measured",) if is_measured else ()), "exposed", "idle")
    columns = ("device", "model", "stage", *times, "peak memory", "of limit", "filled by")
    rows = [_row(track, cluster, step.step_seconds, with_measured=is_measured) for track in tracks]
    beside = "; all but what is called measured is predicted" if is_measured else ""
    return table(f"Devices; those that do the same share a row{beside}", columns, rows, ("stage", *times, "peak memory", "of limit"))


def _row(track: Track, cluster: Cluster, step_seconds: float, *, with_measured: bool) -> tuple[str, ...]:
    each = track.estimate
    ends = (min(track.measured_busy), track.slowest) if track.measured_busy else ()
    measured = " to ".join(dict.fromkeys(format_seconds(each) for each in ends)) or "-"
    return (
        each.name,
        cluster.by_name[each.devices[0]].model,
        ", ".join(map(str, each.stages)),
        format_seconds(each.busy),
        *((measured,) if with_measured else ()),
        format_seconds(each.exposed),
        format_seconds(each.idle(step_seconds)),
        format_bytes(round(each.peak.total)),
        format_share(each.peak.total / each.capacity),
        str(each.peak),
    )


def link_table(step: StepEstimate) -> str:
    """How much passes each link."""
    rows = [
        (
            link.name + (f" and {link.num_alike - 1} like it" if link.num_alike > 1 else ""),
            format_bytes(round(link.num_bytes)),
            format_share(link.share),
        )
        for link in step.links
        if link.num_bytes
    ]
    if not rows:
        return ""
    return table(
        "Links, those most used first (predicted)",
        ("link", "bytes in a step", "of what could pass"),
        rows,
        ("bytes in a step", "of what could pass"),
    )
