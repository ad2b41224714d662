"""Whether a split stage computes its rows in two halves, one of which computes while the other's messages travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from whale.axes import Axes, discover
from whale.axes.batch import MIN_ROWS, Halving, halve, halve_stage
from whale.errors import PlanError, WhaleError
from whale.estimate.costs.line import Started
from whale.estimate.prices.collective_costs import CollectiveCosts, Messages, halved, messages_of
from whale.estimate.prices.part import Recompute
from whale.estimate.prices.prices import Prices, unsized
from whale.hardware.catalogue import CPU
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, Shard
from whale.planning.shard.space import Scene
from whale.sharding.bridges import Bridge
from whale.units import format_seconds

Costs = tuple[tuple[Started, Started], ...]
"""Per device, its forward and its backward pass."""


@dataclass(frozen=True)
class Overlapping:
    """The decision for one stage."""

    is_chosen: bool  # whether it computes in halves
    whole: float  # seconds of the slowest device for a micro-batch at once
    halves: float = 0.0  # the same in two halves; 0 where impossible
    reason: str = ""  # why it is impossible, or that the user set it


@dataclass(eq=False)
class Overlapper:
    """The pass over split stages."""

    prices: Prices
    wanted: bool | None = None  # whether stages compute in halves; None where that pays
    _halvings: dict[tuple[Scene, tuple[Shard, ...]], Halving] = field(default_factory=dict, init=False)

    def choose(
        self,
        collective_costs: CollectiveCosts,
        scene: Scene,
        shards: tuple[Shard, ...],
        bridges: Sequence[Bridge],
        whole: Costs,
        recompute: Recompute,
    ) -> tuple[Overlapping, Costs]:
        """Decides for one stage; returns the decision, and the stage's cost on each device under it.

        `whole` is the cost on each device with its rows at once, messages included.
        """
        rows = collective_costs.site.num_rows
        seconds = _slowest(whole, rows)
        reason = self._obstacle(scene, shards, recompute, rows)
        if self.wanted is False or reason:
            return Overlapping(False, seconds, reason=reason or "communication.overlap: false"), whole
        messages = messages_of(collective_costs, bridges)
        if recompute.num_alive:  # its backward begins with a forward
            messages = replace(
                messages, backward=messages.backward + messages.forward, num_backward=messages.num_backward + messages.num_forward
            )
        in_halves = _in_halves(whole, messages, rows)
        found = _slowest(in_halves, rows)
        if self.wanted is None and _compute_messages(collective_costs):
            return Overlapping(False, seconds, reason="CPUs compute and move messages with the same cores"), whole
        is_chosen = self.wanted is True or found < seconds
        reason = "communication.overlap: true" if self.wanted is True else ""
        return Overlapping(is_chosen, seconds, found, reason), in_halves if is_chosen else whole

    def _obstacle(self, scene: Scene, shards: tuple[Shard, ...], recompute: Recompute, rows: float) -> str:
        """Why a stage cannot be computed in halves; "" where it can."""
        if recompute.segments:
            return "parts of it are recomputed"
        if rows < MIN_ROWS:
            return "it takes one row at a time"
        key = scene, unsized(shards)
        if key not in self._halvings:
            self._halvings[key] = halve(self.prices.graph, self.prices.axes, scene.ops, shards, scene.returned)
        faults = self._halvings[key].faults
        return faults[0] if faults else ""


def _in_halves(whole: Costs, messages: Messages, rows: float) -> Costs:
    return tuple(
        (
            halved(forward, messages.forward, messages.num_forward, messages.num_gaps, rows),
            halved(backward, messages.backward, messages.num_backward, messages.num_gaps, rows),
        )
        for forward, backward in whole
    )


def _compute_messages(collective_costs: CollectiveCosts) -> bool:
    """Whether CPU cores both compute and move messages, with unknown handling: then overlap hides nothing."""
    devices = (collective_costs.prices.cluster.by_name[name] for group in collective_costs.site.groups for name in group)
    return any(device.model == CPU and not device.handling for device in devices)


def _slowest(costs: Costs, rows: float) -> float:
    return max((forward.line(rows) + backward.line(rows)).at(rows) for forward, backward in costs)


def explain_overlap(found: Sequence[Sequence[Overlapping | None]]) -> Iterator[Choice]:
    """One choice per split stage and decision; `found` per replica and stage."""
    seen: dict[tuple[int, Overlapping], list[int]] = {}
    for index, replica in enumerate(found):
        for stage, overlapping in enumerate(replica):
            if overlapping is not None:
                seen.setdefault((stage, overlapping), []).append(index)
    for (stage, overlapping), members in seen.items():
        copies = f" of replica {', '.join(map(str, members))}" if len(members) < len(found) else ""
        whole = f"its rows at once: {format_seconds(overlapping.whole)}"
        halves = f"in two halves: {format_seconds(overlapping.halves)}" if overlapping.halves else ""
        yield Choice(
            "overlap",
            f"rows of stage {stage}{copies}",
            "two halves: one computes during the communication of the other" if overlapping.is_chosen else "at once",
            cost=f"{format_seconds(overlapping.halves if overlapping.is_chosen else overlapping.whole)} per micro-batch",
            bound=overlapping.reason or "compute and communication of the slowest device",
            runner_up=whole if overlapping.is_chosen else halves,
        )


def overlap_faults(plan: Plan, graph: ModelGraph, axes: Axes | None) -> Iterator[WhaleError]:
    """Stages that the plan computes in halves but cannot be; equal ones are checked once."""
    known: dict[tuple[tuple[tuple[str, ...], ...], tuple[str, ...], tuple[Shard, ...]], tuple[str, ...]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            if not stage.overlap:
                continue
            key = tuple(edge.tensors for edge in replica.edges if edge.source == stage.index), stage.ops, stage.shards
            if not stage.shards:
                faults: tuple[str, ...] = ("it is not cut",)
            elif len(stage.program) > 1 or stage.recomputed:
                faults = ("it is not one segment that is kept",)
            else:
                if key not in known:
                    axes = axes or discover(graph)
                    known[key] = halve_stage(graph, axes, replica.edges, stage).faults
                faults = known[key]
            for fault in faults:
                yield PlanError(f"stage {stage.index} of replica {replica.index} cannot be computed in two halves: {fault}")
