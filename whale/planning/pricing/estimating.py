"""The last pass: writes the time of a step, and what each device of each stage needs, into the plan, from the event simulation."""

from __future__ import annotations

from dataclasses import replace

from whale.estimate import StepEstimate, estimate_with
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Estimate, Plan, Stage


def with_estimate(plan: Plan, prices: Prices) -> tuple[Plan, StepEstimate]:
    """The plan with the time of its step and the figures of its stages, and where they are from.

    Where state is shared out and equal parts do not fit, parts follow free memory.
    """
    step = estimate_with(prices, plan)
    if prices.costs.zero and any(each.peak.total > each.capacity for each in step.devices):
        plan = replace(plan, keeper_shares=_by_free_memory(plan, step))
        step = estimate_with(prices, plan)
    return with_figures(plan, step), step


def _by_free_memory(plan: Plan, step: StepEstimate) -> tuple[int, ...]:
    """Per rank, its weight where state is shared out: what its memory has left beside all else, in thousandths of the most."""
    found = (step.of(device) for device in plan.devices)
    free = [max(0.0, each.capacity - each.peak.total + each.peak.optimizer) for each in found]
    return tuple(max(1, round(1000 * own / max(1.0, *free))) for own in free)


def with_figures(plan: Plan, step: StepEstimate) -> Plan:
    """The plan with what an estimate says of its step and its stages."""
    known: dict[tuple[str, int], Estimate] = {}

    def estimate_of(stage: Stage, device: str) -> Estimate:
        """Once for all devices that do the same."""
        found = step.of(device)
        key = found.devices[0], stage.index
        if key not in known:
            known[key] = found.of_stage(stage.index)
        return known[key]

    def with_estimates(stage: Stage) -> Stage:
        return replace(stage, estimates=tuple(estimate_of(stage, device) for device in stage.virtual_device.devices))

    replicas = tuple(replace(replica, stages=tuple(map(with_estimates, replica.stages))) for replica in plan.replicas)
    return replace(plan, replicas=replicas, step_seconds=step.step_seconds)
