"""What a step of the plan takes, told for `whale explain` and `whale plan`."""

from __future__ import annotations

from collections.abc import Iterator

from whale.estimate import StepEstimate
from whale.ir.plan import Choice
from whale.units import counted, format_bytes, format_seconds


def explain_step(step: StepEstimate) -> Iterator[Choice]:
    """Where the time of a step goes, what fills the fullest memory, and what summing gradients takes."""
    slow, full = step.straggler, max(step.devices, key=lambda each: each.peak.total / each.capacity)
    yield Choice(
        "estimate",
        "step",
        format_seconds(step.step_seconds),
        cost=f"{slow.name} {slow.does('computes')} {format_seconds(slow.busy)}, {slow.does('waits')} {format_seconds(slow.exposed)} "
        f"for communication and {format_seconds(slow.idle(step.step_seconds))} for others; bubble rate {step.bubble_rate:.3f}",
        bound=f"time of {slow.name}",
    )
    yield Choice(
        "estimate",
        "memory",
        f"{format_bytes(round(full.peak.total))} of {format_bytes(full.capacity)} on {full.name}",
        cost=str(full.peak),
        bound="the fullest device",
    )
    if slow.syncs:
        yield Choice(
            "estimate",
            "gradient synchronisation",
            f"{counted(len(slow.syncs), 'bucket')}, all-reduced by owner sets, on {slow.name}",
            cost=f"{format_seconds(slow.syncing)} for {format_bytes(round(sum(sync.num_bytes for sync in slow.syncs)))}, "
            f"{format_seconds(slow.exposed_sync)} exposed; optimizer {format_seconds(slow.optimizer)}",
            bound="the slowest link of a ring",
        )
