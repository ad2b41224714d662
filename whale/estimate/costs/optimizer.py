"""Time of the optimizer's step: every weight, gradient and state is read and written; gradients begin the next one at zero."""

from __future__ import annotations

from whale.ir.cluster import Device


def optimizer_seconds(device: Device, weights: float, gradients: float, states: float) -> float:
    """Seconds of one step over so many bytes of trained weights, of their gradients and of what is kept of them."""
    return 2 * (weights + gradients + states) / (device.bandwidth * device.traffic)
