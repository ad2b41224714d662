"""The last pass: writes the time of a step, and what each device of each stage needs, into the plan, from the event simulation."""

from __future__ import annotations

from dataclasses import replace

from whale.estimate import StepEstimate, estimate_with
from whale.estimate.prices.prices import Prices
from whale.ir.plan import Estimate, Plan, Stage


def with_estimate(plan: Plan, prices: Prices) -> tuple[Plan, StepEstimate]:
    """The plan with the time of its step and the figures of its stages, and where they are from."""
    step = estimate_with(prices, plan)
    return with_figures(plan, step), step


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
