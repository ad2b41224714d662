"""What a step of a plan is predicted to be, in the figures that people ask for first; all of them read from its estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from whale.estimate import DeviceEstimate, StepEstimate, pipeline_seconds
from whale.ir.plan import Plan, Replica
from whale.planning.even import EvenShares


@dataclass(frozen=True)
class Simulation:
    """A plan and the estimate of its step.

    Attributes:
        plan: verified.
        step: its estimate.
        even: what equal shares would cost; None where nobody asked.
    """

    plan: Plan
    step: StepEstimate
    even: EvenShares | None = None

    @property
    def samples_per_second(self) -> float:
        """Rows of the global batch by the time of a step."""
        return self.plan.planned_rows / self.step.step_seconds

    @property
    def speedup(self) -> float | None:
        """How many times as fast as with equal shares; None where they were not asked for, or make no plan."""
        seconds = self.even.step_seconds if self.even else None
        return None if seconds is None else seconds / self.step.step_seconds

    @cached_property
    def bounds(self) -> Mapping[str, float]:
        """Seconds that a step cannot be shorter than, by what they leave out.

        ``evenly``: all that is computed, divided evenly among the devices in use. ``slowest``: what the device with the longest work
        computes. ``schedule``: the closed form of the schedules, without messages. ``links``: the time in which the busiest link passes
        its bytes.
        """
        step = self.step
        num_devices = sum(len(each.devices) for each in step.devices)
        return {
            "evenly": sum(each.busy * len(each.devices) for each in step.devices) / num_devices,
            "slowest": step.straggler.busy,
            "schedule": max(map(self._schedule_seconds, self.plan.replicas)),
            "links": step.step_seconds * max((link.share for link in step.links), default=0.0),
        }

    def _schedule_seconds(self, replica: Replica) -> float:
        """The closed form of a replica's schedule for the time that each of its virtual devices computes, but for the optimizer."""
        pipeline = replica.pipeline
        ranks = [0.0] * pipeline.num_ranks
        chunks: list[list[float]] = [[] for _ in ranks]
        for stage, rank in zip(replica.stages, pipeline.stage_rank, strict=True):
            own = (self.step.of(name) for name in stage.virtual_device.devices)
            ranks[rank] = max((each.busy - each.optimizer) / pipeline.num_micro_batch for each in own)
            chunks[rank].append(max((each.forward + each.backward for each in stage.estimates), default=0.0))
        firsts = [own[0] / sum(own) if sum(own) else 1 / len(own) for own in chunks]
        return float(pipeline_seconds(pipeline.schedule, ranks, pipeline.num_micro_batch, pipeline.num_chunks, firsts))

    def as_data(self) -> dict[str, Any]:
        """The figures as plain data; times in seconds, sizes in bytes."""
        step, even = self.step, self.even
        told = {} if even is None else {"even": {"step_seconds": even.step_seconds, "speedup": self.speedup, "reason": even.reason}}
        return {
            "step_seconds": step.step_seconds,
            "samples_per_second": self.samples_per_second,
            "bubble_rate": step.bubble_rate,
            "exposed_communication": step.straggler.exposed,
            "devices": list(self._devices()),
            "bounds": dict(self.bounds),
            **told,
        }

    def _devices(self) -> Iterator[dict[str, Any]]:
        """Each device in use, by rank."""
        told = {id(each): _figures(each, self.step.step_seconds) for each in self.step.devices}
        for name in self.plan.devices:
            yield {"name": name} | told[id(self.step.of(name))]


def _figures(each: DeviceEstimate, step_seconds: float) -> dict[str, Any]:
    return {
        "stages": list(each.stages),
        "busy": each.busy / step_seconds,
        "compute": each.busy,
        "communication": each.communicating,
        "exposed_communication": each.exposed,
        "peak_bytes": round(each.peak.total),
        "capacity_bytes": each.capacity,
        "filled_with": {name: round(num_bytes) for name, num_bytes in each.peak.parts if num_bytes >= 0.5},
    }
