"""How much of the time a run with faults makes progress, by how often it saves.

A fault ends the run: what was done since the last checkpoint is done again after a restart.

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
    """Into what the time of a run goes, as shares of it; they sum to 1.

    Attributes:
        interval_seconds: of work between checkpoints.
        useful: steps that count.
        saving: the time for which checkpoints stop training.
        repeated: work and checkpoints that a fault undid.
        restarting: restarts.
    """

    interval_seconds: float
    useful: float
    saving: float
    repeated: float
    restarting: float


@dataclass(frozen=True)
class Faults:
    """The faults that a run meets: independent, at a constant rate, of which each ends the run.

    Attributes:
        mean_seconds: between two faults, of all devices together.
        save_seconds: for which a checkpoint stops training.
        restart_seconds: from a fault to the first step after it.
    """

    mean_seconds: float
    save_seconds: float
    restart_seconds: float

    def goodput(self, interval_seconds: float) -> Goodput:
        """The expected shares with a checkpoint after so many seconds of work.

        Work of T seconds and its checkpoint take M e^(R / M) (e^((T + d) / M) - 1) seconds: M is the mean between faults, R a restart, d a
        save (Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006).
        """
        mean, segment = self.mean_seconds, interval_seconds + self.save_seconds
        if max(segment, self.restart_seconds) / mean > 500:  # too large for a float
            return Goodput(interval_seconds, 0.0, 0.0, exp(-self.restart_seconds / mean), -expm1(-self.restart_seconds / mean))
        total = mean * exp(self.restart_seconds / mean) * expm1(segment / mean)
        useful, saving, restarting = interval_seconds / total, self.save_seconds / total, -expm1(-self.restart_seconds / mean)
        return Goodput(interval_seconds, useful, saving, max(0.0, 1.0 - useful - saving - restarting), restarting)

    def best_interval(self, least: float) -> float:
        """The seconds of work between checkpoints with the most useful time, not under `least`.

        Where the derivative of `goodput` is 0: (1 - T / M) e^((T + d) / M) = 1. For d far below M it is Young's sqrt(2 d M).
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
    """The shares where each fault leaves the copies of the last copying; None where none are made.

    A copying is a checkpoint in memory then: of a second host that is lost before the run goes on it does not know.
    """
    if step.redundancy is None:
        return None
    return replace(faults, save_seconds=step.redundancy.seconds).goodput(step.redundancy.every * step.step_seconds)


def faults_of(step: StepEstimate, cluster: Cluster, per_device_day: float, restart_seconds: float) -> Faults:
    """The faults that a plan's devices meet, with the time of a copy of its state to the hosts, during which it does not train.

    Args:
        step: the estimate of the plan.
        cluster: its devices.
        per_device_day: faults of one device in a day.
        restart_seconds: from a fault to the first step after it.
    """
    num_devices = sum(len(each.devices) for each in step.devices)
    return Faults(DAY_SECONDS / (per_device_day * num_devices), max(_copy_seconds(each, cluster) for each in step.devices), restart_seconds)


def _copy_seconds(each: DeviceEstimate, cluster: Cluster) -> float:
    """At most so long: where replicas have the same state, each copies a part of it."""
    return copy_seconds(cluster.by_name[each.devices[0]], each.peak.weights + each.peak.optimizer)
