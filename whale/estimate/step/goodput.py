"""The useful share of time of a run with faults, by how often it saves a checkpoint.

A fault ends the run; after a restart the work since the last checkpoint is repeated.

work  work |save| work  work |save| work * restart | work  work |save|
                                    ^^^^ fault: repeated
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, expm1, sqrt

from whale.estimate.costs.compute import copy_seconds
from whale.estimate.step.step import DeviceEstimate, StepEstimate
from whale.ir.cluster import Cluster

DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Goodput:
    """Shares of the time of a run; they sum to 1."""

    interval_seconds: float  # of work between checkpoints
    useful: float  # steps that count
    saving: float  # checkpoints that block training, and redundant copies
    repeated: float  # work and checkpoints lost to faults
    restarting: float  # restarts


@dataclass(frozen=True)
class Faults:
    """Faults of a run: independent, at a constant rate, each ending the run."""

    mean_seconds: float  # between two faults, of all devices together
    save_seconds: float  # for which a checkpoint blocks training
    restart_seconds: float  # from a fault to the first step after it

    def goodput(self, interval_seconds: float) -> Goodput:
        """The expected shares with a checkpoint after so many seconds of work.

        Work of T seconds and its checkpoint take M e^(R / M) (e^((T + d) / M) - 1) seconds: M is the mean between faults, R a
        restart, d a save (Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006).
        """
        mean, segment = self.mean_seconds, interval_seconds + self.save_seconds
        if max(segment, self.restart_seconds) / mean > 500:  # too large for a float
            return Goodput(interval_seconds, 0.0, 0.0, exp(-self.restart_seconds / mean), -expm1(-self.restart_seconds / mean))
        total = mean * exp(self.restart_seconds / mean) * expm1(segment / mean)
        useful, saving, restarting = interval_seconds / total, self.save_seconds / total, -expm1(-self.restart_seconds / mean)
        return Goodput(interval_seconds, useful, saving, max(0.0, 1.0 - useful - saving - restarting), restarting)

    def best_interval(self, least: float) -> float:
        """Seconds of work between checkpoints with the most useful time, at least `least`.

        The derivative of `goodput` is 0 where (1 - T / M) e^((T + d) / M) = 1. For d far below M it is Young's sqrt(2 d M).
        """
        low, high = 0.0, self.mean_seconds  # the left side falls from e^(d / M) >= 1 to 0
        for _ in range(100):
            middle = (low + high) / 2
            left = (1 - middle / self.mean_seconds) * exp(min(700.0, (middle + self.save_seconds) / self.mean_seconds))
            low, high = (middle, high) if left > 1 else (low, middle)
        return max(low, least)

    @property
    def young_interval(self) -> float:
        """sqrt(2 d M): Young, A first order approximation to the optimum checkpoint interval, 1974."""
        return sqrt(2 * self.save_seconds * self.mean_seconds)


def with_copies(faults: Faults, step: StepEstimate) -> Goodput | None:
    """The shares where each fault leaves the latest redundant copies, which act as checkpoints in memory; None without copies.

    It ignores the loss of a second host before the run continues.
    """
    if step.redundancy is None:
        return None
    return with_copying(replace(faults, save_seconds=0.0).goodput(step.redundancy.every * step.step_seconds), step)


def with_copying(found: Goodput, step: StepEstimate) -> Goodput:
    """The shares where the redundant copies of a step count as saving."""
    if step.redundancy is None:
        return found
    copying = found.useful * step.redundancy.step_seconds / step.step_seconds
    return replace(found, useful=found.useful - copying, saving=found.saving + copying)


def faults_of(step: StepEstimate, cluster: Cluster, per_device_day: float, restart_seconds: float) -> Faults:
    """The faults of a plan's devices; a checkpoint blocks training while the state is copied to the hosts.

    Args:
        step: the estimate of the plan.
        cluster: its devices.
        per_device_day: faults of one device per day.
        restart_seconds: from a fault to the first step after it.
    """
    num_devices = sum(len(each.devices) for each in step.devices)
    return Faults(DAY_SECONDS / (per_device_day * num_devices), max(_copy_seconds(each, cluster) for each in step.devices), restart_seconds)


def _copy_seconds(each: DeviceEstimate, cluster: Cluster) -> float:
    """An upper bound: where replicas have the same state, each copies a part of it."""
    return copy_seconds(cluster.by_name[each.devices[0]], each.peak.weights + each.peak.optimizer)
