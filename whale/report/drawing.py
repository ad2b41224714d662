"""The rows of the drawing and its data: bars and curves in ticks of the longest step.

Devices with equal predictions share a row, predicted above measured:

big/0 and 3 more      predicted | F0 F1 B0   B1 |        of the measured ones, that of the slowest
stage 0               measured  | F0  F1 B0  B1 |        replica is shown

A tick is a millionth of the whole, so times are short numbers: 1,024 devices, eight of them different, with 64 micro-batches take about
150 kB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from whale.estimate import DeviceEstimate, StepEstimate
from whale.ir.plan import Plan
from whale.ir.schedule import COMPUTE, Kind
from whale.ir.timeline import DeviceTimeline, Message, StepRecording, Sync

NUM_TICKS = 1_000_000
Ticks = Callable[[float], int]


def drawing(tracks: Sequence[Track]) -> dict[str, object]:
    """The data of the drawing.

    ``tracks[].runs[]`` is the predicted run and, if there is one, the measured one; their ``bars`` are ``[kind, stage, micro-batch, start,
    end]``, -1 for none; ``syncs``, ``waits`` and ``segments`` are ``[text, start, end]``; ``memory`` is ``[tick, bytes]``. ``messages`` are
    ``[run, source track, target track, name, bytes, start, end]``.
    """
    runs = [[track.estimate.timeline, *([] if track.measured is None else [track.measured])] for track in tracks]
    track_of = {name: number for number, track in enumerate(tracks) for name in track.estimate.devices}
    return _drawing(("predicted", "measured"), runs, list(map(_head, tracks)), track_of)


def drawing_of_two(pairs: Sequence[Sequence[DeviceTimeline]], names: tuple[str, str]) -> dict[str, object]:
    """`drawing` of two measured runs, each device with its own track.

    Args:
        pairs: per device, its timeline in both; one without bars if it is in one run alone.
        names: of the runs.
    """
    heads = [{"name": pair[0].device, "alike": 0, "title": _stages(pair), "capacity": 0, "held": 0} for pair in pairs]
    return _drawing(names, pairs, heads, {pair[0].device: number for number, pair in enumerate(pairs)}, isTogether=True)


def _drawing(
    names: tuple[str, str],
    runs: Sequence[Sequence[DeviceTimeline]],
    heads: Sequence[dict[str, object]],
    track_of: Mapping[str, int],
    **flags: bool,
) -> dict[str, object]:
    seconds = max((run.end for each in runs for run in each), default=0.0) or 1.0

    def ticks(time: float) -> int:
        return round(time / seconds * NUM_TICKS)

    return {
        "names": names,
        **flags,
        "seconds": seconds,
        "ticks": NUM_TICKS,
        "kinds": [kind.value for kind in Kind],
        "tracks": [{**head, "runs": [_run(run, ticks) for run in own]} for head, own in zip(heads, runs, strict=True)],
        "messages": [
            message
            for number in range(max(map(len, runs), default=0))
            for message in _messages(number, [own[number] for own in runs if number < len(own)], track_of, ticks)
        ],
    }


def _stages(runs: Sequence[DeviceTimeline]) -> str:
    """The stages that a device computes in some of two runs."""
    found = sorted({span.action.stage for run in runs for span in run.computations if span.action.stage is not None})
    return f"stage {', '.join(map(str, found))}" if found else ""


def _head(track: Track) -> dict[str, object]:
    peak = track.estimate.peak
    return {
        "name": track.estimate.devices[0],
        "alike": len(track.estimate.devices) - 1,
        "title": track.title,
        "capacity": track.estimate.capacity,
        "held": round(peak.weights + peak.gradients + peak.optimizer),
    }


def _run(run: DeviceTimeline, ticks: Ticks) -> dict[str, object]:
    kinds = {kind: number for number, kind in enumerate(Kind)}
    bars = []
    for span in run.actions:
        stage, micro_batch = (-1 if number is None else number for number in (span.action.stage, span.action.micro_batch))
        bars.append([kinds[span.action.kind], stage, micro_batch, ticks(span.start), ticks(span.end)])
    return {
        "device": run.device,
        "bars": bars,
        "syncs": [[_bucket(sync), ticks(sync.start), ticks(sync.end)] for sync in run.syncs],
        "waits": [[each.name, ticks(each.start), ticks(each.end)] for each in run.waits],
        "segments": [[each.name, ticks(each.start), ticks(each.end)] for each in run.segments],
        "memory": [[ticks(time), round(num_bytes)] for time, num_bytes in run.memory],
    }


def _bucket(sync: Sync) -> str:
    stages = ", ".join(map(str, sync.stages))
    return f"{sync.what} of stage {stages}, {sync.num_bytes / 2**20:.1f} MiB over {sync.num_owners} devices"


def _messages(number: int, runs: Iterable[DeviceTimeline], track_of: Mapping[str, int], ticks: Ticks) -> Iterable[list[object]]:
    """Each message once, though both its ends list it, and once per row."""
    found: dict[tuple[str, int, int], Message] = {}
    for run in runs:
        for message in run.messages:
            if message.source in track_of and message.target in track_of:
                found.setdefault((message.name, track_of[message.source], track_of[message.target]), message)
    for (name, source, target), message in found.items():
        yield [number, source, target, name, round(message.num_bytes), ticks(message.start), ticks(message.end)]


MOST_TRACKS = 64  # the straggler's replica and the first replicas are kept
WORK = COMPUTE | {Kind.STEP}


@dataclass(frozen=True)
class Track:
    """Devices that share a row."""

    estimate: DeviceEstimate  # of all of them
    replica: int  # of the first of them
    measured: DeviceTimeline | None = None  # of one of them; None if nothing was measured
    measured_busy: tuple[float, ...] = ()  # measured compute seconds, of each of them

    @property
    def title(self) -> str:
        return f"stage {', '.join(map(str, self.estimate.stages))}"

    @property
    def slowest(self) -> float:
        """The most measured compute seconds."""
        return max(self.measured_busy, default=0.0)


def make_tracks(plan: Plan, step: StepEstimate, recording: StepRecording | None = None) -> tuple[Track, ...]:
    """All tracks, in the order of the plan's ranks."""
    replica_of = {name: replica.index for replica in plan.replicas for stage in replica.stages for name in stage.virtual_device.devices}
    timelines = {} if recording is None else {timeline.device: timeline for timeline in recording.devices}
    busy = {name: busy_seconds(timeline) for name, timeline in timelines.items()}
    slowest = replica_of[max(busy, key=busy.__getitem__)] if busy else -1
    tracks = []
    for each in step.devices:
        own = sorted((name for name in each.devices if name in busy), key=lambda name: (replica_of[name] == slowest, busy[name]))
        measured = timelines[own[-1]] if own else None
        tracks.append(Track(each, replica_of[each.devices[0]], measured, tuple(busy[name] for name in own)))
    return tuple(sorted(tracks, key=lambda track: plan.rank_of[track.estimate.devices[0]]))


def drawn_tracks(tracks: Sequence[Track], straggler: str) -> tuple[Track, ...]:
    """The tracks that are drawn: all, or as many as a page can hold, the replica of the straggler in any case."""
    own = next(track.replica for track in tracks if straggler in track.estimate.devices)
    by_replica = sorted(tracks, key=lambda track: track.replica != own)[:MOST_TRACKS]
    kept = {track.estimate.devices[0] for track in by_replica}
    return tuple(track for track in tracks if track.estimate.devices[0] in kept)


def busy_seconds(timeline: DeviceTimeline) -> float:
    """Seconds in which a device computes."""
    return sum(span.end - span.start for span in timeline.actions if span.action.kind in WORK)
