"""Time of the optimizer's step: every weight, gradient and state is read, and all but the gradient written."""

from __future__ import annotations

from whale.ir.cluster import Device


def optimizer_seconds(device: Device, weights: float, gradients: float, states: float) -> float:
    """Seconds of one step over so many bytes of trained weights, of their gradients and of what is kept of them."""
    return (2 * (weights + states) + gradients) / (device.bandwidth * device.traffic)
