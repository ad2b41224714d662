"""The rows of the picture: devices that are predicted to do the same share one, predicted above measured.

big/0 and 3 like it   predicted | F0 F1 B0   B1 |        of a measured run the one of them
stage 0               measured  | F0  F1 B0  B1 |        that computed longest is shown
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        measured: of the one that computed longest; None where nothing was measured.
        replica: of the first of them.
    """

    estimate: DeviceEstimate
    measured: DeviceTimeline | None
    replica: int

    @property
    def title(self) -> str:
        """The stages that they run."""
        return f"stage {', '.join(map(str, self.estimate.stages))}"

    @property
    def measured_busy(self) -> float:
        """Seconds of computing that were measured."""
        return 0.0 if self.measured is None else busy_seconds(self.measured)


def make_tracks(plan: Plan, step: StepEstimate, recording: StepRecording | None = None) -> tuple[Track, ...]:
    """All tracks, in the order of the plan's ranks."""
    replica_of = {name: replica.index for replica in plan.replicas for stage in replica.stages for name in stage.virtual_device.devices}
    timelines = {} if recording is None else {timeline.device: timeline for timeline in recording.devices}
    tracks = [Track(each, _slowest(each, timelines), replica_of[each.devices[0]]) for each in step.devices]
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


def _slowest(estimate: DeviceEstimate, timelines: Mapping[str, DeviceTimeline]) -> DeviceTimeline | None:
    found = [timelines[name] for name in estimate.devices if name in timelines]
    return max(found, key=busy_seconds, default=None)
