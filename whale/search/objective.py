"""What the best plan minimises: the time of a step, the cost of a sample, or the memory of the fullest device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from whale.errors import ClusterError
from whale.estimate import StepEstimate
from whale.estimate.costs.line import Floats
from whale.ir.cluster import Cluster, Device
from whale.ir.plan import Plan
from whale.planning.strategy import Strategy
from whale.units import format_bytes, format_seconds

Value = TypeVar("Value", float, Floats)

SECONDS_PER_HOUR = 3600.0
MILLION = 1_000_000


@dataclass(frozen=True)
class Objective:
    """How plans are judged; less is better."""

    name: str  # value of ``planning.objective``
    cluster: Cluster  # for cost, with a price for every device
    num_rows: int  # of a step

    def of(self, plan: Plan, step: StepEstimate) -> float:
        """The value of a plan with its estimate."""
        if self.name == "memory":
            return max(each.peak.total for each in step.devices)
        if self.name == "step_time":
            return step.step_seconds
        per_hour = self.cluster.price_per_hour(plan.devices)
        assert per_hour is not None, "checked before the search"
        return self._sample(per_hour) * step.step_seconds

    def likely(self, strategy: Strategy, seconds: Value, held: Value) -> Value:
        """The value of a strategy, from the closed form of its step seconds and of bytes on the fullest device."""
        if self.name == "memory":
            return held
        return seconds if self.name == "step_time" else seconds * self._sample(self._per_hour(strategy))

    def of_sample(self, value: float, num_rows: int) -> float:
        """Makes values of batches of different sizes comparable."""
        return value / num_rows if self.name == "step_time" else value

    def text(self, value: float) -> str:
        if self.name == "memory":
            return f"{format_bytes(round(value))} on the fullest device"
        return format_seconds(value) if self.name == "step_time" else format_cost(value)

    def _sample(self, per_hour: float) -> float:
        """The cost of a second per sample."""
        return per_hour / SECONDS_PER_HOUR / self.num_rows

    def _per_hour(self, strategy: Strategy) -> float:
        """The price of its devices, or of the cheapest that it can take."""
        named = strategy.names or [device.name for device in strategy.devices or ()]
        if named:
            return self.cluster.price_per_hour(named) or 0.0
        return sum(self._cheapest[kind][number] for kind, number in strategy.taken.items())

    @cached_property
    def _cheapest(self) -> Mapping[Device, tuple[float, ...]]:
        """Per device type, the lower bound of what n of the cheapest devices cost per hour; a host's price is shared by its devices."""
        prices: dict[Device, list[float]] = {}
        for device in self.cluster.devices:
            prices.setdefault(device.kind, []).append(self.cluster.price_share(device))
        return {kind: tuple(accumulate(sorted(own), initial=0.0)) for kind, own in prices.items()}


def format_cost(cost: float) -> str:
    """``20.5 per million samples``."""
    return f"{cost * MILLION:.4g} per million samples"


def check_prices(cluster: Cluster) -> None:
    """Raises ClusterError where a device has no price."""
    unpriced = Counter(device.model for device in cluster.devices if cluster.price_per_hour((device.name,)) is None)
    if not unpriced:
        return
    listing = ", ".join(f"{count} x {model}" for model, count in unpriced.items())
    model, count = next(iter(unpriced.items()))
    raise ClusterError(
        f"planning.objective: cost needs prices, and {listing} of cluster {cluster.name!r} have none",
        hint=f"in the cluster file: {{model: {model}, count: {count}, price_per_hour: 1.20}}, or price_per_hour of a whole host",
    )
