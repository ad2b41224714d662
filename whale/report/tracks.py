"""The rows of the picture: devices that are predicted to do the same share one, predicted above measured.

big/0 and 3 like it   predicted | F0 F1 B0   B1 |        of a measured run the one of them is shown that
stage 0               measured  | F0  F1 B0  B1 |        belongs to the replica that held up the others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale.estimate import DeviceEstimate, StepEstimate
from whale.ir.plan import Plan
from whale.ir.schedule import COMPUTE, Kind
from whale.ir.timeline import DeviceTimeline, StepRecording

MOST_TRACKS = 64
"""More are left out: those of the straggler's replica and of the first replicas stay."""
WORK = COMPUTE | {Kind.STEP}


@dataclass(frozen=True)
class Track:
    """Devices that share a row.

    Attributes:
        estimate: what is predicted of them.
        replica: of the first of them.
        measured: of one of them; None where nothing was measured.
        measured_busy: seconds of computing that were measured, of each of them.
    """

    estimate: DeviceEstimate
    replica: int
    measured: DeviceTimeline | None = None
    measured_busy: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """The stages that they run."""
        return f"stage {', '.join(map(str, self.estimate.stages))}"

    @property
    def slowest(self) -> float:
        """The most seconds of computing that were measured."""
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
    """Those that are drawn: all, or as many as a page can hold, whole replicas first.

    Args:
        straggler: a device whose replica is drawn in any case.
    """
    own = next(track.replica for track in tracks if straggler in track.estimate.devices)
    by_replica = sorted(tracks, key=lambda track: track.replica != own)[:MOST_TRACKS]
    kept = {track.estimate.devices[0] for track in by_replica}
    return tuple(track for track in tracks if track.estimate.devices[0] in kept)


def busy_seconds(timeline: DeviceTimeline) -> float:
    """Seconds in which a device computes."""
    return sum(span.end - span.start for span in timeline.actions if span.action.kind in WORK)
