"""How fast the devices of a run are compared with what its plan assumed, by their measured compute times in each of the last steps.

slowness of a device in a step      busy / predicted x slowdown that the plan assumed
its slowdown in a step              its slowness / that of the median device: errors of prediction common to all cancel
persistent                          in `PERSISTENT` of the last `WINDOW` steps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from whale.units import counted, format_seconds

WINDOW = 16  # steps that are examined
PERSISTENT = 13  # steps of these in which a device must be slow: more than chance gives
SLOW = 1.15  # slowdown from which a device is slow; ratio from which it deviates from the plan's

Busy = tuple[float, ...]  # compute seconds of each rank of a plan in a step


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """A device of the plan at work."""

    device: str
    rank: int  # of the plan
    busy_seconds: float  # compute seconds of a step without waits: the median over the steps
    spread: float  # the distance of their quartiles, as a share of it
    predicted_seconds: float  # of the same, by the plan
    assumed: float  # the slowdown that the plan assumed, relative to the median device
    slowdown: float  # median of its slowdowns, by the figures of the cluster
    middle: float = 1.0  # the slowdown that the plan assumed for the median device, by the figures of the cluster
    slow_since: int | None = None  # the first step in which it was slow, if it is persistently; else None
    deviates: bool = False  # whether its speed persistently differs from what the plan assumed

    @property
    def measured(self) -> float:
        """The slowdown that a plan should assume, by the figures of the cluster."""
        if not self.deviates:
            return self.middle * self.assumed
        return self.middle * (1.0 if 1 / SLOW < self.slowdown < SLOW else float(f"{self.slowdown:.2g}"))

    def __str__(self) -> str:
        text = f"{self.device} (rank {self.rank}): computes {format_seconds(self.busy_seconds)} in a step (spread {self.spread:.0%}), "
        text += f"predicted {format_seconds(self.predicted_seconds)}: {self.slowdown:.3g} x the time of the median device"
        return text if self.slow_since is None else f"{text}, slow since step {self.slow_since}"


@dataclass(frozen=True)
class Health:
    """The devices of the plan at work, over some steps."""

    step_number: int = 0  # of the last step
    num_steps: int = 0  # that were measured, at most `WINDOW`
    # by rank of the plan; empty before a step was measured, or if nothing is predicted, as for a single device
    devices: tuple[DeviceHealth, ...] = ()

    @property
    def slow(self) -> tuple[DeviceHealth, ...]:
        """The persistently slow devices."""
        return tuple(each for each in self.devices if each.slow_since is not None)

    @property
    def deviates(self) -> bool:
        """Whether the speed of a device persistently differs from what the plan assumed."""
        return any(each.deviates for each in self.devices)

    @property
    def slowdowns(self) -> dict[str, float]:
        """The slowdowns that a plan should assume, by device."""
        return {each.device: each.measured for each in self.devices}

    @staticmethod
    def of(
        steps: Sequence[tuple[int, Busy]],
        devices: Sequence[str],
        predicted: Busy,
        assumed: Mapping[str, float],
        before: Health | None = None,
    ) -> Health:
        """The health by measured times.

        Args:
            steps: ascending step numbers, with the times of each.
            devices: of the plan, by rank.
            predicted: compute seconds of a step by the plan.
            assumed: the slowdowns that the plan assumed.
            before: an earlier value, maybe of another plan, for the step since when devices are slow.
        """
        if not steps or not all(predicted):
            return Health() if before is None else before
        absolute = [assumed.get(device, 1.0) for device in devices]
        middle, own = _middle(absolute), _relative(absolute)
        slowdowns = [_relative([each / by * known for each, by, known in zip(busy, predicted, absolute, strict=True)]) for _, busy in steps]
        since = {} if before is None else {each.device: each.slow_since for each in before.devices}
        numbers = [number for number, _ in steps]
        found = []
        for rank, (device, slowdown) in enumerate(zip(devices, zip(*slowdowns, strict=True), strict=True)):
            seconds = [busy[rank] for _, busy in steps]
            low, usual, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
            off = sum(each > own[rank] * SLOW for each in slowdown), sum(each < own[rank] / SLOW for each in slowdown)
            slow_since = _slow_since(numbers, slowdown, since.get(device))
            figures = usual, (high - low) / usual, predicted[rank], own[rank], median(slowdown), middle
            found.append(DeviceHealth(device, rank, *figures, slow_since, max(off) >= PERSISTENT))
        return Health(numbers[-1], len(steps), tuple(found))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.devices:
            yield "health: nothing measured yet"
            return
        yield f"health at step {self.step_number}, over {counted(self.num_steps, 'step')}"
        yield from (f"  {each}" for each in self.devices)


def _middle(slowness: Sequence[float]) -> float:
    """The lower median, so that one slow device of two is slow."""
    return sorted(slowness)[(len(slowness) - 1) // 2]


def _relative(slowness: Sequence[float]) -> list[float]:
    middle = _middle(slowness)
    return [each / middle for each in slowness]


def _slow_since(numbers: Sequence[int], slowdowns: Sequence[float], before: int | None) -> int | None:
    """The first step in which a device was slow, if it persistently is; `before` by earlier steps."""
    slow = [number for number, found in zip(numbers, slowdowns, strict=True) if found > SLOW]
    if len(slow) >= PERSISTENT:
        return slow[0] if before is None else before
    return None if len(slowdowns) - len(slow) >= PERSISTENT else before
