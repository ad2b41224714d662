"""Time of the optimizer's step: every weight, gradient and state is read, and all but the gradient written."""

from __future__ import annotations

from whale.ir.cluster import Device


def optimizer_seconds(device: Device, trainable_bytes: float, optimizer_states: int) -> float:
    """Seconds of one step over `trainable_bytes` of weights; it is bound by memory traffic.

    Weight and states are read and written, the gradient is read.
    """
    return trainable_bytes * (2 * (1 + optimizer_states) + 1) / device.bandwidth
