"""What one action of each stage costs, as the simulation reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

from whale.errors import ConfigError, raise_faults
from whale.ir.schedule import Kind

Times = float | Sequence[float]  # one figure for all stages, or one for each


@dataclass(frozen=True)
class ActionTimes:
    """Durations in one unit of the caller's choice (seconds, as a rule), each for one micro-batch of one stage.

    Attributes:
        forward: of F.
        backward_input: of I; the whole backward B takes this and `backward_weight`.
        backward_weight: of W.
        recompute: of R.
        sync: of SYNC, the synchronisation of one stage's gradients, once per step.
        transfer: latency of a hop between ranks; it occupies no device.
    """

    forward: Times
    backward_input: Times
    backward_weight: Times = 0.0
    recompute: Times = 0.0
    sync: Times = 0.0
    transfer: float = 0.0

    def durations(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """Per kind of action, the duration per stage.

        Raises:
            ConfigError: a list of figures of another length, or a figure that is negative or not finite.
        """
        self._check(num_stages)
        forward, inputs, weights, recompute, sync = (
            _per_stage(times, num_stages) for times in (self.forward, self.backward_input, self.backward_weight, self.recompute, self.sync)
        )
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: tuple(i + w for i, w in zip(inputs, weights, strict=True)),
            Kind.BACKWARD_INPUT: inputs,
            Kind.BACKWARD_WEIGHT: weights,
            Kind.RECOMPUTE: recompute,
            Kind.SYNC: sync,
        }

    def _check(self, num_stages: int) -> None:
        faults = []
        for field in fields(self):
            times = getattr(self, field.name)
            figures = tuple(times) if isinstance(times, Sequence) else (times,)
            if isinstance(times, Sequence) and len(times) != num_stages:
                faults.append(ConfigError(f"{field.name} is one figure, or one per stage ({len(times)} figures, stages: {num_stages})"))
            faults += [
                ConfigError(f"a time is finite and not negative ({field.name}: {time:g})") for time in figures if not 0 <= time < inf
            ]
        raise_faults(faults)


def _per_stage(times: Times, num_stages: int) -> tuple[float, ...]:
    return tuple(times) if isinstance(times, Sequence) else (times,) * num_stages
