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
    replicas = tuple(
        replace(replica, stages=tuple(replace(stage, estimates=_estimates(stage, step)) for stage in replica.stages))
        for replica in plan.replicas
    )
    return replace(plan, replicas=replicas, step_seconds=step.step_seconds)


def _estimates(stage: Stage, step: StepEstimate) -> tuple[Estimate, ...]:
    return tuple(step.of(device).of_stage(stage.index) for device in stage.virtual_device.devices)
