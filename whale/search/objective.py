"""What is least in the best plan: the time of a step, what a sample costs, or the memory of the fullest device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from whale.errors import ClusterError
from whale.estimate import Line, StepEstimate
from whale.ir.cluster import Cluster, Device
from whale.ir.plan import Plan
from whale.schedules import peak_in_flight
from whale.search.arrangement import Order, Team
from whale.search.sketch.sketch import Sketches
from whale.units import format_bytes, format_seconds

SECONDS_PER_HOUR = 3600.0
MILLION = 1_000_000


class Objective(Protocol):
    """How plans are judged; less is better."""

    def of(self, plan: Plan, step: StepEstimate) -> float:
        """Of a plan, with its estimate."""
        ...

    def likely(self, teams: Sequence[Team], order: Order, micro_batches: Sequence[int], seconds: Sequence[float]) -> Sequence[float]:
        """What plans of arrangements that differ in their micro-batches come to, roughly, if their steps take about so long each.

        It says which are looked at first.
        """
        ...

    def of_sample(self, value: float, num_rows: int) -> float:
        """What compares plans for unlike batches, of a plan's value and its rows."""
        ...

    def text(self, value: float) -> str:
        """A value, as people read it."""
        ...


@dataclass(frozen=True)
class LeastTime:
    """Seconds of a step."""

    def of(self, plan: Plan, step: StepEstimate) -> float:
        return step.step_seconds

    def likely(self, teams: Sequence[Team], order: Order, micro_batches: Sequence[int], seconds: Sequence[float]) -> Sequence[float]:
        return seconds

    def of_sample(self, value: float, num_rows: int) -> float:
        return value / num_rows

    def text(self, value: float) -> str:
        return format_seconds(value)


@dataclass(frozen=True)
class LeastCost:
    """What a sample costs, in the currency of the cluster's prices.

    Attributes:
        cluster: with a price for every device.
        num_rows: of a step.
    """

    cluster: Cluster
    num_rows: int

    def of(self, plan: Plan, step: StepEstimate) -> float:
        per_hour = self.cluster.price_per_hour(plan.devices)
        assert per_hour is not None, "checked before the search"
        return self._sample(per_hour, step.step_seconds)

    def likely(self, teams: Sequence[Team], order: Order, micro_batches: Sequence[int], seconds: Sequence[float]) -> Sequence[float]:
        per_hour = self._per_hour(teams)
        return [self._sample(per_hour, own) for own in seconds]

    def of_sample(self, value: float, num_rows: int) -> float:
        return value

    def text(self, value: float) -> str:
        return format_cost(value)

    def _per_hour(self, teams: Sequence[Team]) -> float:
        """What the cheapest devices cost that these replicas can take."""
        taken: Counter[Device] = Counter()
        for team in teams:
            taken.update(team.taken)
        return sum(self._cheapest[kind][number] for kind, number in taken.items())

    def _sample(self, per_hour: float, seconds: float) -> float:
        return per_hour / SECONDS_PER_HOUR * seconds / self.num_rows

    @cached_property
    def _cheapest(self) -> Mapping[Device, tuple[float, ...]]:
        """Per kind, what so many of the cheapest devices cost an hour at least: of a host's price each device bears its part."""
        prices: dict[Device, list[float]] = {}
        for device in self.cluster.devices:
            prices.setdefault(device.kind, []).append(self.cluster.price_share(device))
        return {kind: tuple(accumulate(sorted(own), initial=0.0)) for kind, own in prices.items()}


@dataclass(frozen=True)
class LeastMemory:
    """Bytes on the device that holds most when it is fullest.

    Attributes:
        sketches: know the bytes of the model.
    """

    sketches: Sketches

    def of(self, plan: Plan, step: StepEstimate) -> float:
        return max(each.peak.total for each in step.devices)

    def likely(self, teams: Sequence[Team], order: Order, micro_batches: Sequence[int], seconds: Sequence[float]) -> Sequence[float]:
        """An equal part of the parameters, and what is in flight on the first rank keeps; split groups hold most of that whole."""
        least = self.sketches.parameter_bytes / min(team.one.num_devices for team in teams)
        rows = self.sketches.num_rows / sum(team.count for team in teams)
        alive = (max(self._alive(team, order, m) / team.num_ranks for team in teams) for m in micro_batches)
        return [least + self._activations.at(rows / m) * own for m, own in zip(micro_batches, alive, strict=True)]

    def of_sample(self, value: float, num_rows: int) -> float:
        return value

    def text(self, value: float) -> str:
        return f"{format_bytes(round(value))} on the fullest device"

    def _alive(self, team: Team, order: Order, num_micro_batch: int) -> float:
        """Micro-batches in flight on the first rank."""
        if team.num_ranks == 1:
            return 1.0
        v = order.num_chunks
        return peak_in_flight(order.schedule, num_ranks=team.num_ranks, num_micro_batch=num_micro_batch, num_chunks=v)[0] / v

    @cached_property
    def _activations(self) -> Line:
        prices = self.sketches.prices
        return Line.sum(prices.outputs[name] for name in prices.activations)


@dataclass(frozen=True)
class SmallestFirst:
    """Another objective, by which what takes least memory is looked at first.

    Attributes:
        judge: that objective.
        memory: knows what takes least.
    """

    judge: Objective
    memory: LeastMemory

    def of(self, plan: Plan, step: StepEstimate) -> float:
        return self.judge.of(plan, step)

    def likely(self, teams: Sequence[Team], order: Order, micro_batches: Sequence[int], seconds: Sequence[float]) -> Sequence[float]:
        return self.memory.likely(teams, order, micro_batches, seconds)

    def of_sample(self, value: float, num_rows: int) -> float:
        return self.judge.of_sample(value, num_rows)

    def text(self, value: float) -> str:
        return self.judge.text(value)


def format_cost(cost: float) -> str:
    """What a sample costs, for people: ``20.5 per million samples``."""
    return f"{cost * MILLION:.4g} per million samples"


def objective_of(name: str, cluster: Cluster, sketches: Sketches) -> Objective:
    """The objective of a name that ``planning.objective`` takes.

    Raises:
        ClusterError: what a sample costs is asked for, and devices have no price.
    """
    if name == "cost":
        check_prices(cluster)
        return LeastCost(cluster, sketches.num_rows)
    return LeastMemory(sketches) if name == "memory" else LeastTime()


def check_prices(cluster: Cluster) -> None:
    """Refuses a cluster in which a device has no price.

    Raises:
        ClusterError: naming the kinds, and how a price is written.
    """
    unpriced = Counter(device.model for device in cluster.devices if cluster.price_per_hour((device.name,)) is None)
    if not unpriced:
        return
    said = ", ".join(f"{count} x {model}" for model, count in unpriced.items())
    model, count = next(iter(unpriced.items()))
    raise ClusterError(
        f"planning.objective cost needs a price for every device ({said} of cluster {cluster.name} have none)",
        hint=f"in the cluster file: {{model: {model}, count: {count}, price_per_hour: 1.20}}, or price_per_hour of a whole host",
    )
